"""One member of the network: the agent that keeps in touch with the hub and looks after the training processes."""
