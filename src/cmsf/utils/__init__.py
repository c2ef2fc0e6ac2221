"""What any program needs; nothing in here knows the method."""
