"""A web page that shows active and finished runs. It reads only their event files."""
