"""What a load run is summed up to."""
