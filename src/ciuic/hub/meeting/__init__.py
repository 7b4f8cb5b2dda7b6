"""The rendezvous of torch.distributed: groups, generations and their stores."""
