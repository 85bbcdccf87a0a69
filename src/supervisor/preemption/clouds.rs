//! Questions to the metadata service of each cloud, and the meaning of the answers.

use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use reqwest::header::{HeaderName, HeaderValue};
use reqwest::{Method, StatusCode};
use serde::Deserialize;

use super::announcement::{Action, Announcement, Cloud};
use super::metadata_service::{Answer, AskError, MetadataService, parse_time};
use crate::clock;

/// Time for an exchange with the service, which usually answers within milliseconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Time for the first list of Azure's events. Azure documents up to two minutes: the first request enables the events.
const FIRST_EVENTS_LIMIT: Duration = Duration::from_secs(130);

/// Validity of a token of AWS: the longest that the service grants.
const TOKEN_TTL: Duration = Duration::from_secs(6 * 3600);
/// Time after which a token is replaced, well before its end.
const TOKEN_USE: Duration = Duration::from_secs(5 * 3600);
const TOKEN: &str = "/latest/api/token";
const INSTANCE_ACTION: &str = "/latest/meta-data/spot/instance-action";

const PREEMPTED: &str = "/computeMetadata/v1/instance/preempted";
/// Time from the preemption's notice to the machine's end, as Google documents it.
const PREEMPTED_NOTICE: SignedDuration = SignedDuration::from_secs(30);
const FLAVOR: &str = "metadata-flavor";
const GOOGLE: HeaderValue = HeaderValue::from_static("Google");

const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";
const NAME: &str = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";

/// Cloud that is asked, with what it has answered so far.
pub(super) enum Asked {
    Aws {
        /// The token, and the time at which it was issued.
        token: Option<(HeaderValue, Instant)>,
    },
    Gcp,
    Azure {
        machine: Machine,
        /// True once the events were listed.
        lists_events: bool,
    },
}

/// Knowledge of this machine's name in Azure's events.
pub(super) enum Machine {
    NotAsked,
    Named(String),
    /// The service does not name it.
    Unnamed,
}

impl Asked {
    pub(super) fn new(cloud: Cloud) -> Self {
        match cloud {
            Cloud::Aws => Self::Aws { token: None },
            Cloud::Gcp => Self::Gcp,
            Cloud::Azure => Self::Azure {
                machine: Machine::NotAsked,
                lists_events: false,
            },
        }
    }

    pub(super) fn cloud(&self) -> Cloud {
        match self {
            Self::Aws { .. } => Cloud::Aws,
            Self::Gcp => Cloud::Gcp,
            Self::Azure { .. } => Cloud::Azure,
        }
    }

    /// Returns the time between two questions: as AWS and Azure recommend. Google gives as little time as Azure.
    pub(super) fn interval(&self) -> Duration {
        match self {
            Self::Aws { .. } => Duration::from_secs(5),
            Self::Gcp | Self::Azure { .. } => Duration::from_secs(1),
        }
    }

    /// Asks for a notice; returns it with the time that is left.
    pub(super) async fn ask(
        &mut self,
        service: &MetadataService,
    ) -> Result<Option<(Announcement, Duration)>, AskError> {
        match self {
            Self::Aws { token } => ask_aws(service, token).await,
            Self::Gcp => ask_gcp(service).await,
            Self::Azure {
                machine,
                lists_events,
            } => ask_azure(service, machine, lists_events).await,
        }
    }
}

/// Returns an announcement and the time until its deadline.
fn announced(
    cloud: Cloud,
    action: Action,
    deadline: Timestamp,
    now: Timestamp,
) -> (Announcement, Duration) {
    let left = Duration::try_from(deadline.duration_since(now));
    let announcement = Announcement {
        cloud,
        action,
        deadline,
    };
    (announcement, left.unwrap_or_default())
}

/// The notice of AWS.
#[derive(Deserialize)]
struct InstanceAction {
    action: Action,
    time: Timestamp,
}

async fn ask_aws(
    service: &MetadataService,
    token: &mut Option<(HeaderValue, Instant)>,
) -> Result<Option<(Announcement, Duration)>, AskError> {
    let is_fresh = |(_, issued): &(HeaderValue, Instant)| {
        clock::now().saturating_duration_since(*issued) < TOKEN_USE
    };
    let known = token.take().filter(is_fresh);
    let was_known = known.is_some();
    let mut current = match known {
        Some(known) => known,
        None => aws_token(service).await?,
    };
    let mut answer = aws_action(service, &current.0).await?;
    if answer.status == StatusCode::UNAUTHORIZED && was_known {
        current = aws_token(service).await?;
        answer = aws_action(service, &current.0).await?;
    }
    *token = Some(current);
    match answer.status {
        StatusCode::NOT_FOUND => Ok(None),
        StatusCode::OK => {
            let notice: InstanceAction = parse(&answer)?;
            let notice = announced(Cloud::Aws, notice.action, notice.time, answer.time);
            Ok(Some(notice))
        }
        _ => Err(answer.refused()),
    }
}

async fn aws_token(service: &MetadataService) -> Result<(HeaderValue, Instant), AskError> {
    let ttl = (
        "x-aws-ec2-metadata-token-ttl-seconds",
        HeaderValue::from(TOKEN_TTL.as_secs()),
    );
    let issued = clock::now();
    let answer = service.ask(Method::PUT, TOKEN, ttl, ANSWER_LIMIT).await?;
    if answer.status != StatusCode::OK || answer.body.is_empty() {
        return Err(answer.refused());
    }
    let token = HeaderValue::from_bytes(&answer.body);
    // The body is not in the message: it may be a token.
    let mut token = token.map_err(|_| answer.not_understood(&"it is not a token"))?;
    token.set_sensitive(true);
    Ok((token, issued))
}

async fn aws_action(service: &MetadataService, token: &HeaderValue) -> Result<Answer, AskError> {
    let token = ("x-aws-ec2-metadata-token", token.clone());
    service
        .ask(Method::GET, INSTANCE_ACTION, token, ANSWER_LIMIT)
        .await
}

async fn ask_gcp(service: &MetadataService) -> Result<Option<(Announcement, Duration)>, AskError> {
    let answer = service
        .ask(Method::GET, PREEMPTED, (FLAVOR, GOOGLE), ANSWER_LIMIT)
        .await?;
    if answer.status != StatusCode::OK {
        return Err(answer.refused());
    }
    if answer.headers.get(HeaderName::from_static(FLAVOR)) != Some(&GOOGLE) {
        return Err(answer.not_understood(&"it is not from Google's metadata server"));
    }
    match answer.body.trim_ascii() {
        b"FALSE" => Ok(None),
        b"TRUE" => {
            let deadline = answer.time.saturating_add(PREEMPTED_NOTICE);
            let deadline = deadline.unwrap_or(answer.time);
            let notice = announced(Cloud::Gcp, Action::Preempt, deadline, answer.time);
            Ok(Some(notice))
        }
        _ => Err(answer.not_understood(&"neither TRUE nor FALSE")),
    }
}

/// The list of Azure's scheduled events.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ScheduledEvents {
    events: Vec<ScheduledEvent>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ScheduledEvent {
    event_type: String,
    /// Names of the machines that the event affects.
    #[serde(default)]
    resources: Vec<String>,
    /// Earliest time of the event; empty if it has begun.
    #[serde(default)]
    not_before: String,
}

impl ScheduledEvent {
    /// Returns the action if it ends a machine. Other events reboot, move or freeze it.
    fn action(&self) -> Option<Action> {
        match self.event_type.as_str() {
            "Preempt" => Some(Action::Preempt),
            "Terminate" => Some(Action::Terminate),
            _ => None,
        }
    }

    /// Returns true if the event may be this machine's: the list has the events of all machines of a set.
    fn is_for(&self, machine: &Machine) -> bool {
        match machine {
            Machine::Named(name) => self
                .resources
                .iter()
                .any(|resource| resource.eq_ignore_ascii_case(name)),
            Machine::NotAsked | Machine::Unnamed => true,
        }
    }
}

async fn ask_azure(
    service: &MetadataService,
    machine: &mut Machine,
    lists_events: &mut bool,
) -> Result<Option<(Announcement, Duration)>, AskError> {
    let header = || ("metadata", HeaderValue::from_static("true"));
    if let Machine::NotAsked = machine {
        let answer = service
            .ask(Method::GET, NAME, header(), ANSWER_LIMIT)
            .await?;
        let name = String::from_utf8(answer.body).ok();
        let name = name.map(|name| name.trim().to_owned());
        let name = name.filter(|name| answer.status == StatusCode::OK && !name.is_empty());
        *machine = name.map_or(Machine::Unnamed, Machine::Named);
    }
    let limit = if *lists_events {
        ANSWER_LIMIT
    } else {
        FIRST_EVENTS_LIMIT
    };
    let answer = service.ask(Method::GET, EVENTS, header(), limit).await?;
    if answer.status != StatusCode::OK {
        return Err(answer.refused());
    }
    let list: ScheduledEvents = parse(&answer)?;
    *lists_events = true;
    let ours = list.events.iter().filter(|event| event.is_for(machine));
    let mut earliest: Option<(Action, Timestamp)> = None;
    for (event, action) in ours.filter_map(|event| Some((event, event.action()?))) {
        let deadline = match event.not_before.as_str() {
            "" => answer.time,
            text => {
                parse_time(text).ok_or_else(|| answer.not_understood(&"NotBefore is no time"))?
            }
        };
        if earliest.is_none_or(|(_, other)| deadline < other) {
            earliest = Some((action, deadline));
        }
    }
    let notice = |(action, deadline)| announced(Cloud::Azure, action, deadline, answer.time);
    Ok(earliest.map(notice))
}

fn parse<'a, T: Deserialize<'a>>(answer: &'a Answer) -> Result<T, AskError> {
    serde_json::from_slice(&answer.body).map_err(|error| answer.not_understood(&error))
}
