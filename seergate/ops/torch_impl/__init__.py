"""The torch backend: fast on CPUs, runs on any device. One file per op; the public op has checked the arguments."""
