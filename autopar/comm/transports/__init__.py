"""What carries messages between processes: sockets and shared memory beside torch.distributed."""
