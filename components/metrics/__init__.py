"""Numbers worth writing down about each step."""
