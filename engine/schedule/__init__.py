"""Scheduling: admission of requests to slots and pages, and the plan of the next step."""
