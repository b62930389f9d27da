"""Doors into frameworks, a module each, which imports its framework only when it is imported or called itself."""
