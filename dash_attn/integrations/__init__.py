"""Integrations with frameworks. Each module imports its framework only when it is imported or called itself."""
