//! Restarts and restores: killed jobs, hanging jobs, repeated starts, and rehearsals.

mod again;
mod attempts;
mod hangs;
mod rehearse;
mod rehearse_verdicts;
mod restarts;
mod restores;
mod stacks;
