"""What to run: recipes, their keys, schedules and learning rates. No torch in this room."""
