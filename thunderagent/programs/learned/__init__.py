"""What is learned from turns that end, tools that return and programs that are through."""
