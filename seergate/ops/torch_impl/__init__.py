"""The torch backend: fast on CPUs, runs on any device. One file per op; arguments have been checked by the public op."""
