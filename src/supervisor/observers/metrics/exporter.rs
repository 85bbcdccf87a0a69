//! Exporter of the run's metrics: a file for the node exporter's textfile collector, and an HTTP endpoint.
//!
//! ```text
//! an event, or 15 s ─▶ ask the loop for the status ─▶ text ─▶ file, replaced by renaming
//! GET /metrics ──────▶ ask the loop for the status ─▶ text ─▶ answer
//! ```
//! Both ask as any client does, and cannot stop or change the run. If the file cannot be written or the address not be
//! used, one warning reports it and the job continues.

use std::fs::Permissions;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::mpsc::Sender;
use tokio::time::{sleep, timeout};

use super::http::Hosts;
use crate::config;
use crate::path_walk::{self, ForeignLink};
use crate::run::format::chain;
use crate::store::fs::durable::TEMPORARY_PREFIX;
use crate::supervisor::inbox::{Message, ask_status};
use crate::supervisor::observers::run_status::Status;
use crate::sync::locked;

/// The longest that a file is left as it is: half of what a scraper that is asked every 30 s would miss.
const WRITE_INTERVAL: Duration = Duration::from_secs(15);
/// The shortest: a burst of events is one write.
const WRITE_PAUSE: Duration = Duration::from_millis(200);

#[derive(Debug, Default)]
pub(crate) struct Metrics {
    file: Option<Arc<TextFile>>,
    /// Notified when something happened.
    pub news: Arc<Notify>,
}

impl Metrics {
    /// Begins to tell. Must be called inside the runtime.
    pub fn start(settings: &config::Metrics, inbox: &Sender<Message>) -> Self {
        let hosts = if settings.allow_remote {
            Hosts::Any
        } else {
            Hosts::ThisMachine
        };
        if let Some(address) = settings.listen
            && let Err(error) = super::http::listen(address, hosts, inbox.clone())
        {
            tracing::warn!(%address, "cannot serve metrics (metrics.listen): {error}");
        }
        let file = settings.textfile.clone().map(TextFile::new).map(Arc::new);
        let metrics = Self {
            file,
            news: Arc::default(),
        };
        if let Some(file) = &metrics.file {
            let (file, news) = (Arc::clone(file), Arc::clone(&metrics.news));
            tokio::spawn(keep_written(file, news, inbox.clone()));
        }
        metrics
    }

    /// The run has ended so: the last figures.
    pub fn end(&self, status: &Status) {
        if let Some(file) = &self.file {
            file.write(status, true);
        }
    }
}

async fn keep_written(file: Arc<TextFile>, news: Arc<Notify>, inbox: Sender<Message>) {
    while let Some(status) = ask_status(&inbox).await {
        let file = Arc::clone(&file);
        // The next one waits for this one.
        let _ = tokio::task::spawn_blocking(move || file.write(&status, false)).await;
        sleep(WRITE_PAUSE).await;
        // Whether there is news or not, it is time.
        let _ = timeout(WRITE_INTERVAL, news.notified()).await;
    }
}

#[derive(Debug)]
pub(super) struct TextFile {
    path: PathBuf,
    state: Mutex<FileState>,
}

#[derive(Debug, Default)]
struct FileState {
    /// True if the file has its last content.
    closed: bool,
    /// True if the failure to write was logged.
    told: bool,
}

impl TextFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            state: Mutex::default(),
        }
    }

    pub(super) fn write(&self, status: &Status, last: bool) {
        let mut state = locked(&self.state);
        if state.closed {
            return;
        }
        state.closed = last;
        let Err(error) = replace(
            &self.path,
            &crate::supervisor::observers::metrics::prometheus_text::of(status),
        ) else {
            return;
        };
        if !state.told {
            let path = self.path.display();
            tracing::warn!(%path, "cannot write the metrics (metrics.textfile): {}", chain(&error));
            state.told = true;
        }
    }
}

/// Readers see the old content or the new. It need not outlive a power failure.
///
/// The folder may belong to another user, such as the collector's: it is held by a descriptor, and no link of that user's is
/// followed.
fn replace(path: &Path, content: &str) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let folder = path_walk::open_folder(folder.unwrap_or(Path::new(".")), ForeignLink::refuse)
        .map_err(io::Error::other)?;
    let held = format!("/proc/self/fd/{}", folder.as_raw_fd());
    let mut file = tempfile::Builder::new()
        .prefix(TEMPORARY_PREFIX)
        .tempfile_in(&held)?;
    file.write_all(content.as_bytes())?;
    // The collector runs as another user.
    file.as_file()
        .set_permissions(Permissions::from_mode(0o644))?;
    file.persist(Path::new(&held).join(name))?;
    Ok(())
}
