"""LIST of many pages as several chains of requests side by side."""
