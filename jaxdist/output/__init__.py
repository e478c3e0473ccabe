"""What people see: text on streams that never ends a run, numbers with their units, and what all pictures have."""
