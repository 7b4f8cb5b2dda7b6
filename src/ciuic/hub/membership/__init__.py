"""Who is in the network and who works for which run: pure state machines, their rows and questions about them."""
