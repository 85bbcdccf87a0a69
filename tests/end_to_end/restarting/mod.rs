//! Restarts and restores: of killed jobs, hanging jobs, runs that are started again, and rehearsals of all that.

mod again;
mod attempts;
mod hangs;
mod rehearse;
mod rehearse_verdicts;
mod restarts;
mod restores;
mod stacks;
