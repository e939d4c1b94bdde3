"""The OpenAI-compatible surface that clients and load balancers see."""
