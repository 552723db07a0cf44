"""What the cases time: functions of cumulant, and of other libraries that do the same work."""
