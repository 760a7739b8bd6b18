"""A recorded run again: trained without engines, or sampled again by one; and the records of other frameworks."""
