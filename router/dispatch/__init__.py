"""Jobs on their way: queue, attempts, failover."""
