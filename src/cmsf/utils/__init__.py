"""General helpers; nothing here knows the method."""
