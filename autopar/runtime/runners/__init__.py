"""Where the ranks are: processes under torchrun, or local workers."""
