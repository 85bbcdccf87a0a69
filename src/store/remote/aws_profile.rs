//! Credentials of a profile of the AWS command line (`~/.aws`), which the library `object_store` does not read.
//!
//! The program `aws` prints them (`aws configure export-credentials`, which also the SDKs' setting `credential_process`
//! can name). It knows all kinds of profiles: keys, roles, single sign-on, other programs.

use std::env;
use std::ffi::OsString;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use serde::Deserialize;
use tokio::sync::Mutex;

use crate::clock;

/// Time for which credentials are used that expire. The program renews them at least 10 min before.
const KEPT: Duration = Duration::from_secs(300);
/// Time limit for the program, which may ask a server.
const ASK_LIMIT: Duration = Duration::from_secs(60);
/// Variables that name other credentials, which the SDKs prefer to a profile.
const PREFERRED: [&str; 2] = ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"];
const REMEDY: &str = "AWS_PROFILE needs the AWS CLI 2.9 or later, and a profile that it can use without you; or unset it, \
     and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
/// Variables that name the region.
const REGIONS: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];

/// Profile whose credentials the program `aws` prints.
#[derive(Debug)]
pub(super) struct AwsProfile {
    program: PathBuf,
    kept: Mutex<Option<Kept>>,
}

#[derive(Debug)]
struct Kept {
    credential: Arc<AwsCredential>,
    /// `None`: they do not expire.
    until: Option<Instant>,
}

/// Output of the program.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

impl AwsProfile {
    /// Returns the profile that the SDKs would use, with its first credentials. Returns `None` if the environment names
    /// other credentials, or if no profile is named and the default one has none.
    ///
    /// # Errors
    /// `AWS_PROFILE` is set, and the program is not installed or prints no credentials.
    pub(super) async fn chosen() -> Result<Option<Self>, String> {
        if PREFERRED.iter().any(|name| value_of(name).is_some()) {
            return Ok(None);
        }
        let is_named = value_of("AWS_PROFILE").is_some();
        if !is_named && !has_files() {
            return Ok(None);
        }
        let profile = match program_in(value_of("PATH")) {
            Some(program) => Self::of(program),
            None if is_named => return Err(format!("no program `aws` is in PATH; {REMEDY}")),
            None => return Ok(None),
        };
        match profile.credential().await {
            Ok(_) => Ok(Some(profile)),
            Err(error) if is_named => Err(format!("{error}; {REMEDY}")),
            Err(error) => {
                tracing::debug!("the default profile of AWS is not used: {error}");
                Ok(None)
            }
        }
    }

    fn of(program: PathBuf) -> Self {
        Self {
            program,
            kept: Mutex::new(None),
        }
    }

    /// Returns the profile's region; `None` if the environment names one, or the profile has none.
    pub(super) fn region(&self) -> Option<String> {
        if REGIONS.iter().any(|name| value_of(name).is_some()) {
            return None;
        }
        let mut command = Command::new(&self.program);
        command.args(["configure", "get", "region"]);
        let done = command.stdin(Stdio::null()).output().ok()?;
        let region = String::from_utf8(done.stdout).ok()?.trim().to_owned();
        (done.status.success() && !region.is_empty()).then_some(region)
    }

    async fn credential(&self) -> io::Result<Arc<AwsCredential>> {
        let mut kept = self.kept.lock().await;
        if let Some(kept) = &*kept
            && kept.until.is_none_or(|until| clock::now() < until)
        {
            return Ok(Arc::clone(&kept.credential));
        }
        let printed = self.ask().await?;
        let credential = Arc::new(AwsCredential {
            key_id: printed.access_key_id,
            secret_key: printed.secret_access_key,
            token: printed.session_token,
        });
        *kept = Some(Kept {
            credential: Arc::clone(&credential),
            until: printed.expiration.map(|_| clock::now() + KEPT),
        });
        Ok(credential)
    }

    async fn ask(&self) -> io::Result<Printed> {
        let mut command = tokio::process::Command::new(&self.program);
        command.args(["configure", "export-credentials", "--format", "process"]);
        let command = command.stdin(Stdio::null()).kill_on_drop(true);
        let done = tokio::time::timeout(ASK_LIMIT, command.output()).await;
        let done = done.map_err(|_| {
            io::Error::other(format!(
                "`aws configure export-credentials` did not end within {ASK_LIMIT:?}"
            ))
        })??;
        if !done.status.success() {
            let said = String::from_utf8_lossy(&done.stderr);
            // The version 1 does not know the command, and prints its usage first.
            let said = said.trim().lines().last().unwrap_or_default();
            return Err(io::Error::other(format!(
                "`aws configure export-credentials` failed ({}): {said}",
                done.status
            )));
        }
        // An error would quote the output, which is secret.
        serde_json::from_slice(&done.stdout).map_err(|_| {
            io::Error::other("`aws configure export-credentials` printed no credentials")
        })
    }
}

impl CredentialProvider for AwsProfile {
    type Credential = AwsCredential;

    fn get_credential<'a, 'b>(
        &'a self,
    ) -> Pin<Box<dyn Future<Output = object_store::Result<Arc<AwsCredential>>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async {
            let credential = self.credential().await;
            credential.map_err(|error| object_store::Error::Generic {
                store: "S3",
                source: Box::new(error),
            })
        })
    }
}

/// Returns a variable's value; an empty one counts as missing.
fn value_of(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Returns true if a file exists that may have a default profile.
fn has_files() -> bool {
    let home = value_of("HOME").map(PathBuf::from);
    let place = |variable: &str, name: &str| {
        let named = value_of(variable).map(PathBuf::from);
        named.or_else(|| Some(home.as_ref()?.join(".aws").join(name)))
    };
    let places = [
        place("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
        place("AWS_CONFIG_FILE", "config"),
    ];
    places.into_iter().flatten().any(|path| path.exists())
}

fn program_in(path: Option<OsString>) -> Option<PathBuf> {
    let places = env::split_paths(&path?)
        .map(|folder| folder.join("aws"))
        .collect::<Vec<_>>();
    places
        .into_iter()
        .find(|program| program.is_absolute() && program.is_file())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Has a program in the place of `aws` asked twice; returns the answers and how often it was run.
    fn asked_twice(prints: &str) -> ([io::Result<Arc<AwsCredential>>; 2], usize) {
        let folder = tempfile::tempdir().unwrap();
        let (program, runs) = (folder.path().join("aws"), folder.path().join("runs"));
        let script = format!("#!/bin/sh\necho \"$@\" >>{}\n{prints}\n", runs.display());
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let profile = AwsProfile::of(program);
        let answers = [1, 2].map(|_| runtime.block_on(profile.credential()));
        let runs = fs::read_to_string(runs).unwrap();
        for line in runs.lines() {
            assert_eq!(line, "configure export-credentials --format process");
        }
        (answers, runs.lines().count())
    }

    #[test]
    fn credentials_are_asked_for_once() {
        for expiration in ["", ", \"Expiration\": \"2030-01-01T00:00:00+00:00\""] {
            let printed = format!(
                "echo '{{\"Version\": 1, \"AccessKeyId\": \"key\", \"SecretAccessKey\": \"hidden\", \"SessionToken\": \"token\"\
                 {expiration}}}'"
            );
            let (answers, runs) = asked_twice(&printed);
            for answer in answers {
                let credential = answer.unwrap();
                assert_eq!(credential.key_id, "key");
                assert_eq!(credential.secret_key, "hidden");
                assert_eq!(credential.token.as_deref(), Some("token"));
            }
            assert_eq!(runs, 1);
        }
    }

    #[test]
    fn a_failure_is_named_and_asked_about_again() {
        let (answers, runs) = asked_twice("echo 'the sign-on has expired' >&2; exit 255");
        for answer in answers {
            let said = answer.unwrap_err().to_string();
            assert!(said.contains("the sign-on has expired"), "{said}");
        }
        assert_eq!(runs, 2);
    }

    #[test]
    fn output_of_another_kind_is_not_quoted() {
        let (answers, _) = asked_twice("echo '{\"SecretAccessKey\": \"hidden\"}'");
        for answer in answers {
            let said = answer.unwrap_err().to_string();
            assert!(!said.contains("hidden"), "{said}");
        }
    }
}
