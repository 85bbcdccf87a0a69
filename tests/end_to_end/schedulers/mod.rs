//! Runs under schedulers: the printed templates, a real Slurm, and notifications of systemd.

mod cluster;
mod slurm;
mod systemd;
mod templates;
