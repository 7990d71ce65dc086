"""The operator: attend, inspect, explain, and the rules of who may meet."""
