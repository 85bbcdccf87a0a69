"""The parts of benches/peers.

`rounds` is the procedure; `criu_peers` and `own_peers` are the compared tools; `process`, `pulse`
and `meter` are jobs, their heartbeat and a tool's resource usage; `machine`, `results` and `plot`
report the results.
"""
