//! Requests to the metadata service of a cloud: plain HTTP without proxies and redirects, limited in time and size.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use jiff::fmt::rfc2822;
use reqwest::header::{DATE, HeaderMap, HeaderName, HeaderValue};
use reqwest::redirect::Policy;
use reqwest::{Client, Method, StatusCode};

use crate::clock;
use crate::config::Endpoint;
use crate::run::format::chain;
use crate::store::remote::bucket::use_ring;

/// Address of the service in all three clouds.
const LINK_LOCAL: &str = "http://169.254.169.254";
/// Time in which a connection must be made: the service is in the machine's host. Outside of a cloud nothing answers.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// Limit on an answer. The longest is the list of Azure's events, some hundred bytes for each.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Failure to get an answer, or an answer that is none.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    /// No answer arrived in time.
    #[error("{path}: {reason}")]
    NoAnswer { path: &'static str, reason: String },
    /// The answer is not what the service is documented to answer.
    #[error("{path}: the answer is not understood ({reason})")]
    NotUnderstood { path: &'static str, reason: String },
}

/// Answer of the service.
pub(super) struct Answer {
    path: &'static str,
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
    /// Time of the answer by the cloud's clock, which sets the deadlines; by this machine's if it names none.
    pub(super) time: Timestamp,
}

impl Answer {
    pub(super) fn not_understood(&self, reason: &dyn fmt::Display) -> AskError {
        AskError::NotUnderstood {
            path: self.path,
            reason: reason.to_string(),
        }
    }

    /// Returns the error for a status that the service is not documented to send.
    pub(super) fn refused(&self) -> AskError {
        self.not_understood(&format_args!("status {}", self.status.as_u16()))
    }
}

/// Client of the service.
pub(super) struct MetadataService {
    client: Client,
    address: String,
}

impl MetadataService {
    pub(super) fn new(endpoint: Option<&Endpoint>) -> Result<Self, reqwest::Error> {
        use_ring();
        let client = Client::builder()
            .no_proxy()
            .redirect(Policy::none())
            .http1_only()
            .connect_timeout(CONNECT_LIMIT)
            // No TLS is used: without this, a machine without certificates would be refused.
            .tls_certs_only([])
            .build()?;
        Ok(Self {
            client,
            address: endpoint.map_or(LINK_LOCAL, Endpoint::as_str).to_owned(),
        })
    }

    /// Makes a request with one header. `limit` is the time for the whole exchange.
    pub(super) async fn ask(
        &self,
        method: Method,
        path: &'static str,
        (name, value): (&'static str, HeaderValue),
        limit: Duration,
    ) -> Result<Answer, AskError> {
        let failed = |error: reqwest::Error| AskError::NoAnswer {
            path,
            reason: chain(&error.without_url()),
        };
        let request = self
            .client
            .request(method, format!("{}{path}", self.address))
            .header(HeaderName::from_static(name), value)
            .timeout(limit);
        let mut response = request.send().await.map_err(failed)?;
        let mut answer = Answer {
            path,
            status: response.status(),
            headers: std::mem::take(response.headers_mut()),
            body: Vec::new(),
            time: clock::timestamp(),
        };
        if let Some(time) = answer.headers.get(DATE).and_then(time_of) {
            answer.time = time;
        }
        while let Some(part) = response.chunk().await.map_err(failed)? {
            if answer.body.len() + part.len() > ANSWER_BYTES_MAX {
                return Err(answer.not_understood(&"it is too long"));
            }
            answer.body.extend_from_slice(&part);
        }
        Ok(answer)
    }
}

fn time_of(value: &HeaderValue) -> Option<Timestamp> {
    parse_time(value.to_str().ok()?)
}

/// Parses a time of HTTP: `Mon, 19 Sep 2016 18:29:47 GMT`.
pub(super) fn parse_time(text: &str) -> Option<Timestamp> {
    let time = rfc2822::DateTimeParser::new().parse_timestamp(text);
    time.ok()
}
