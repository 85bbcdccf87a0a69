"""The parts of benches/peers: what is run (`tools`), on what (`world`), how it is measured, how it is told."""
