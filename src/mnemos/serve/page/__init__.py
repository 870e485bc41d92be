"""The chat page of the server: one HTML file, one style sheet, one icon and ES modules, served as they are."""
