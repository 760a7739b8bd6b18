"""The inference servers of a run: started, attached, joined, watched and scaled."""
