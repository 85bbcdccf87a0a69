//! The watch: it finds the cloud, asks it at its interval, and sends the first notice to the loop.

use std::time::Duration;

use tokio::sync::mpsc::Sender;
use tokio::time::sleep;

use super::announcement::{Announcement, Cloud};
use super::clouds::Asked;
use super::metadata_service::MetadataService;
use crate::config::{NoticeSource, Preemption};
use crate::run::format::chain;
use crate::supervisor::decide::event::Event;
use crate::supervisor::inbox::Message;

/// Time between two searches for a cloud. The first one finds it, unless the network of the machine is late.
const SEARCH_PAUSE: Duration = Duration::from_secs(60);

/// Watches for a notice as the settings request, as long as the runtime lives.
pub(in crate::supervisor) fn watch(settings: &Preemption, inbox: &Sender<Message>) {
    let clouds = match settings.watch {
        NoticeSource::Off => return,
        NoticeSource::Auto => Cloud::ALL.to_vec(),
        NoticeSource::Aws => vec![Cloud::Aws],
        NoticeSource::Gcp => vec![Cloud::Gcp],
        NoticeSource::Azure => vec![Cloud::Azure],
    };
    let service = match MetadataService::new(settings.endpoint.as_ref()) {
        Ok(service) => service,
        Err(error) => {
            tracing::warn!(
                "cannot watch for preemption notices, the job runs without: {}",
                chain(&error)
            );
            return;
        }
    };
    let inbox = inbox.clone();
    tokio::spawn(async move {
        let (announcement, left) = notice(&service, &clouds).await;
        // The loop ends with the run only.
        let event = Event::Preempted(announcement, left);
        let _ = inbox.send(Message::Event(event)).await;
    });
}

/// Waits for a notice of one of these clouds; returns it with the time that is left.
pub(super) async fn notice(
    service: &MetadataService,
    clouds: &[Cloud],
) -> (Announcement, Duration) {
    let (mut asked, mut found) = find(service, clouds).await;
    let cloud = asked.cloud().name();
    tracing::info!("asking {cloud} for preemption notices");
    let mut is_told = false;
    loop {
        if let Some(notice) = found {
            return notice;
        }
        sleep(asked.interval()).await;
        found = match asked.ask(service).await {
            Ok(found) => found,
            Err(error) if is_told => {
                tracing::debug!("cannot ask {cloud} for preemption notices: {error}");
                None
            }
            Err(error) => {
                is_told = true;
                tracing::warn!(
                    "cannot ask {cloud} for preemption notices, the job continues and ckpt-run asks again: {error}"
                );
                None
            }
        };
    }
}

/// Searches for the cloud that answers; returns its first answer too.
async fn find(
    service: &MetadataService,
    clouds: &[Cloud],
) -> (Asked, Option<(Announcement, Duration)>) {
    let mut is_told = false;
    loop {
        let mut failures = Vec::new();
        for cloud in clouds {
            let mut asked = Asked::new(*cloud);
            match asked.ask(service).await {
                Ok(found) => return (asked, found),
                Err(error) => failures.push(format!("{}: {error}", cloud.name())),
            }
        }
        let failures = failures.join("; ");
        match clouds {
            _ if is_told => tracing::debug!("no cloud answers: {failures}"),
            [cloud] => tracing::warn!(
                "no preemption notice can arrive, because the metadata service of {} gives no valid answer; \
                 ckpt-run asks again every minute; check preemption.watch and the machine's access to the service: {failures}",
                cloud.name()
            ),
            _ => {
                tracing::info!(
                    "no cloud answers, so no preemption notice can arrive; ckpt-run asks again every minute"
                );
                tracing::debug!("{failures}");
            }
        }
        is_told = true;
        sleep(SEARCH_PAUSE).await;
    }
}
