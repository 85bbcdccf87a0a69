//! Faults: killed jobs, supervisors and CRIUs, full disks, damaged images, changed files, slow dumps, hostile clients.
//! After each, the job computes or can be restored.

mod chained_jobs;
mod changed_files;
mod counter_job;
mod criu_faults;
mod damage;
mod damaged_memory;
mod full_disk;
mod hanging_disk;
mod job_output;
mod kills;
mod last_changes;
mod loop_disk;
mod power_failure;
mod random_kills;
mod requests;
mod shared_files;
mod stopped_job;
