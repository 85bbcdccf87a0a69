//! A model of several supervisors with one run, and of verbs that change its images beside them: drifting clocks, slow
//! and lost replies, suspended machines. It uses the rules of `lease` and `shared_state`. It checks that never two of
//! them run the job, that each entry makes its own change and no other, and that no change that succeeded is lost.

mod party;
mod simulation;
