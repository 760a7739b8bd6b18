"""The sending half of a weight update: gathering, encoding, publishing and storing."""
