//! Object storage, as far as it is needed here: objects are created once and never changed, read in parts, listed and
//! removed.
//!
//! All calls block and may be made from any thread outside of an async runtime. A failed request is repeated with
//! increasing delays until the limit of the bucket.

use std::fmt;
use std::fs;
use std::future::Future;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Once};
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, RetryConfig};
use tokio::runtime::Runtime;
use url::Url;

use super::aws_profile::AwsProfile;
use super::remote_error::RemoteError;
use crate::printable::chain;
use crate::store::durable;

/// Time in which a connection must be made.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Schemes of the addresses.
const SCHEMES: [&str; 4] = ["s3", "gs", "az", "file"];
/// Parameters of an address that are secrets, in errors of servers and libraries.
const SECRET_PARAMETERS: [&str; 3] = ["sig=", "X-Amz-Signature=", "X-Goog-Signature="];

/// Folder in object storage.
#[derive(Clone)]
pub(crate) struct Bucket {
    store: Arc<dyn ObjectStore>,
    folder: Path,
    background: Arc<Background>,
    limit: Duration,
    url: String,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bucket").field(&self.url).finish()
    }
}

/// Runtime that makes the requests. It may be dropped inside another runtime, where a wait for its thread would panic.
struct Background(Option<Runtime>);

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Object in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Object {
    pub(crate) name: String,
    /// Its length.
    pub(crate) bytes: u64,
}

/// Result of creating an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Created {
    /// The object is new.
    New,
    /// An object of this name existed, or an earlier attempt of the same request created it.
    Existed,
}

impl Bucket {
    /// Opens the folder at an address; makes no request to it. `limit` is the time for one operation with all its
    /// attempts. Credentials come from the provider's environment variables, an AWS profile or the role of the machine.
    /// A folder of this machine is created, and must be closed to other users.
    pub(crate) fn open(address: &str, limit: Duration) -> Result<Self, RemoteError> {
        Self::open_with(address, limit, |path| {
            let made = durable::create_parents(path).and_then(|()| durable::create_folder(path));
            made.map_err(|error| chain(&error))
        })
    }

    /// Opens a folder like [`open`](Self::open), and creates none.
    pub(crate) fn open_existing(address: &str, limit: Duration) -> Result<Self, RemoteError> {
        Self::open_with(address, limit, |_| Ok(()))
    }

    fn open_with(
        address: &str,
        limit: Duration,
        prepare: impl FnOnce(&std::path::Path) -> Result<(), String>,
    ) -> Result<Self, RemoteError> {
        let refused = |reason: String| RemoteError::Address {
            url: without_secrets(address),
            reason,
        };
        let url = Url::parse(address).map_err(|error| refused(error.to_string()))?;
        if !SCHEMES.contains(&url.scheme()) {
            return Err(refused(format!("the scheme {:?} is unknown", url.scheme())));
        }
        if url.password().is_some() || !url.username().is_empty() || url.query().is_some() {
            return Err(refused(
                "it must not contain credentials or parameters".to_owned(),
            ));
        }
        use_ring();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("remote")
            .enable_all()
            .build()
            .map_err(|error| refused(error.to_string()))?;
        if url.scheme() == "file" {
            let path = url
                .to_file_path()
                .map_err(|()| refused("it has no path".to_owned()))?;
            prepare(&path)
                .and_then(|()| check_private(&path))
                .map_err(refused)?;
        }
        let (store, folder) =
            client(&url, limit, &runtime).map_err(|error| refused(text(&error)))?;
        Ok(Self {
            store: Arc::from(store),
            folder,
            background: Arc::new(Background(Some(runtime))),
            limit,
            url: address.trim_end_matches('/').to_owned(),
        })
    }

    /// Returns the address.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Creates an object.
    pub(crate) fn create(&self, name: &str, content: Bytes) -> Result<Created, RemoteError> {
        let path = self.path(name);
        let options = PutOptions::from(PutMode::Create);
        let payload = PutPayload::from_bytes(content);
        let put = self.wait(self.store.put_opts(&path, payload, options));
        match put {
            Ok(_) => Ok(Created::New),
            Err(Failure::Store(
                object_store::Error::AlreadyExists { .. }
                | object_store::Error::Precondition { .. },
            )) => Ok(Created::Existed),
            Err(failure) => Err(self.failed(&format!("create {name}"), &failure)),
        }
    }

    /// Checks that the server does not replace an existing object, on which the lease relies.
    pub(crate) fn check_create_only(&self) -> Result<(), RemoteError> {
        let random = crate::clock::random().map_err(RemoteError::Seal)?;
        let name = format!("probe/{}", blake3::Hash::from_bytes(random).to_hex());
        self.create(&name, Bytes::from_static(b"1"))?;
        let again = self.create(&name, Bytes::from_static(b"2"))?;
        self.remove(&name)?;
        match again {
            Created::Existed => Ok(()),
            Created::New => Err(RemoteError::NotCreateOnly {
                url: self.url.clone(),
            }),
        }
    }

    /// Returns an object's content; `None` if it does not exist.
    pub(crate) fn get(&self, name: &str) -> Result<Option<Bytes>, RemoteError> {
        let path = self.path(name);
        let read = self.wait(async { self.store.get(&path).await?.bytes().await });
        match read {
            Ok(content) => Ok(Some(content)),
            Err(Failure::Store(object_store::Error::NotFound { .. })) => Ok(None),
            Err(failure) => Err(self.failed(&format!("read {name}"), &failure)),
        }
    }

    /// Returns a part of an object.
    pub(crate) fn get_range(&self, name: &str, range: Range<u64>) -> Result<Bytes, RemoteError> {
        let path = self.path(name);
        let wanted = range.end - range.start;
        let read = self.wait(self.store.get_range(&path, range));
        let content = read.map_err(|failure| match failure {
            Failure::Store(object_store::Error::NotFound { .. }) => {
                self.damaged(name, "it is missing")
            }
            failure => self.failed(&format!("read {name}"), &failure),
        })?;
        if content.len() as u64 == wanted {
            Ok(content)
        } else {
            Err(self.damaged(name, "it is shorter than expected"))
        }
    }

    /// Returns the objects in a folder whose names follow `after` in alphabetical order, sorted by name.
    pub(crate) fn list(
        &self,
        folder: &str,
        after: Option<&str>,
    ) -> Result<Vec<Object>, RemoteError> {
        let path = self.path(folder);
        let found = self.wait(async {
            let objects = match after {
                Some(after) => self.store.list_with_offset(Some(&path), &self.path(after)),
                None => self.store.list(Some(&path)),
            };
            objects.try_collect::<Vec<_>>().await
        });
        let found = found.map_err(|failure| self.failed(&format!("list {folder}"), &failure))?;
        let objects = found.iter().filter_map(|found| {
            Some(Object {
                name: self.name(&found.location)?,
                bytes: found.size,
            })
        });
        let mut objects: Vec<Object> = objects.collect();
        objects.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        Ok(objects)
    }

    /// Removes an object; a missing one is no error.
    pub(crate) fn remove(&self, name: &str) -> Result<(), RemoteError> {
        let path = self.path(name);
        match self.wait(self.store.delete(&path)) {
            Ok(()) | Err(Failure::Store(object_store::Error::NotFound { .. })) => Ok(()),
            Err(failure) => Err(self.failed(&format!("remove {name}"), &failure)),
        }
    }

    /// Creates the error for an object with an unexpected content.
    pub(crate) fn damaged(&self, object: &str, reason: impl fmt::Display) -> RemoteError {
        RemoteError::Damaged {
            url: self.url.clone(),
            object: object.to_owned(),
            reason: reason.to_string(),
        }
    }

    fn path(&self, name: &str) -> Path {
        let parts = name.split('/').map(object_store::path::PathPart::from);
        self.folder.parts().chain(parts).collect()
    }

    /// Returns the name that [`path`](Self::path) was made from.
    fn name(&self, path: &Path) -> Option<String> {
        let parts = path.prefix_match(&self.folder)?;
        let parts: Vec<_> = parts.map(|part| part.as_ref().to_owned()).collect();
        Some(parts.join("/"))
    }

    fn wait<T>(
        &self,
        request: impl Future<Output = Result<T, object_store::Error>>,
    ) -> Result<T, Failure> {
        let Some(runtime) = &self.background.0 else {
            return Err(Failure::Late);
        };
        runtime.block_on(async {
            let answer = tokio::time::timeout(self.limit, request).await;
            answer.map_err(|_| Failure::Late)?.map_err(Failure::Store)
        })
    }

    fn failed(&self, what: &str, failure: &Failure) -> RemoteError {
        RemoteError::Request {
            url: self.url.clone(),
            what: what.to_owned(),
            reason: match failure {
                Failure::Late => format!("no answer within {} s", self.limit.as_secs()),
                Failure::Store(error) => text(error),
            },
        }
    }
}

enum Failure {
    Late,
    Store(object_store::Error),
}

/// Creates the client of a provider.
fn client(
    url: &Url,
    limit: Duration,
    runtime: &Runtime,
) -> Result<(Box<dyn ObjectStore>, Path), object_store::Error> {
    let path = Path::from_url_path(url.path())?;
    let retries = RetryConfig {
        retry_timeout: limit,
        ..RetryConfig::default()
    };
    let options = object_store::ClientOptions::new()
        .with_timeout(limit)
        .with_connect_timeout(CONNECT_LIMIT);
    let store: Box<dyn ObjectStore> = match url.scheme() {
        "s3" => {
            let mut builder = object_store::aws::AmazonS3Builder::from_env().with_url(url.as_str());
            if let Some(profile) = runtime.block_on(AwsProfile::chosen()).map_err(unusable)? {
                if let Some(region) = profile.region() {
                    builder = builder.with_region(region);
                }
                builder = builder.with_credentials(Arc::new(profile));
            }
            // The environment variable of the SDKs for another server than Amazon's; plain HTTP is possible only there.
            let is_plain = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"]
                .iter()
                .find_map(|name| std::env::var(name).ok())
                .is_some_and(|endpoint| endpoint.starts_with("http://"));
            let options = options.with_allow_http(is_plain);
            Box::new(
                builder
                    .with_client_options(options)
                    .with_retry(retries)
                    .build()?,
            )
        }
        "gs" => {
            let builder = object_store::gcp::GoogleCloudStorageBuilder::from_env();
            let builder = builder.with_url(url.as_str()).with_client_options(options);
            Box::new(builder.with_retry(retries).build()?)
        }
        "az" => {
            let builder = object_store::azure::MicrosoftAzureBuilder::from_env();
            let builder = builder.with_url(url.as_str()).with_client_options(options);
            Box::new(builder.with_retry(retries).build()?)
        }
        _ => Box::new(object_store::local::LocalFileSystem::new().with_fsync(true)),
    };
    Ok((store, path))
}

fn unusable(reason: String) -> object_store::Error {
    object_store::Error::Generic {
        store: "S3",
        source: reason.into(),
    }
}

/// Returns true for the address of object storage, valid or not; any other text is a path.
pub(crate) fn is_address(text: &str) -> bool {
    let scheme = text.split_once("://").map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| SCHEMES.contains(&scheme))
}

/// Returns an address without the credentials that it may contain.
pub(crate) fn without_secrets(address: &str) -> String {
    let (place, _) = address.split_once('?').unwrap_or((address, ""));
    match (place.split_once("://"), place.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, place))) => format!("{scheme}://…@{place}"),
        _ => place.to_owned(),
    }
}

/// Checks that a folder is for this user alone.
fn check_private(path: &std::path::Path) -> Result<(), String> {
    let found = fs::metadata(path).map_err(|error| error.to_string())?;
    let is_ours = found.uid() == nix::unistd::geteuid().as_raw();
    if is_ours && found.mode().trailing_zeros() >= 6 {
        return Ok(());
    }
    Err("the folder must belong to you and be closed to others (chmod 700): images contain all secrets of the job".to_owned())
}

/// Has the TLS library use the one cryptographic library that is compiled in.
pub(crate) fn use_ring() {
    static ONCE: Once = Once::new();
    // An error means that a provider has been chosen already.
    ONCE.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
}

/// Returns an error and its causes as one line, without secrets.
fn text(error: &object_store::Error) -> String {
    let mut text = chain(error);
    for parameter in SECRET_PARAMETERS {
        let mut from = 0;
        while let Some(found) = text[from..].find(parameter) {
            let begin = from + found + parameter.len();
            let len = text[begin..].find(['&', ' ', '"', ')', '<']);
            let end = len.map_or(text.len(), |len| begin + len);
            text.replace_range(begin..end, "…");
            from = begin;
        }
    }
    text
}
