"""The parts of benches/peers.

`rounds` is what happens, in which order; `criu_peers` and `own_peers` are who takes part; `process`,
`pulse` and `meter` are jobs, their heartbeat and what a tool uses; `machine`, `results` and `plot`
tell of it.
"""
