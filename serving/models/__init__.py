"""Models by the name that users give them: folders, the hub, the demo model."""
