"""Many requests on one stream: one message for each engine step."""
