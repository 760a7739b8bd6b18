"""Trainers and servers that another program controls, such as a client of Tinker's API."""
