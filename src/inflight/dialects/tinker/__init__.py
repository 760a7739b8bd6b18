"""The training API of Tinker, served by a trainer worker and inference endpoints."""
