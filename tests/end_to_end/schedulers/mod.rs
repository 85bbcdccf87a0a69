//! Runs under schedulers: what the templates print, a real Slurm, and what systemd hears.

mod cluster;
mod slurm;
mod systemd;
mod templates;
