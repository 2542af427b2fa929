"""What stands in the place of attention where a layer keeps other things than K and V."""
