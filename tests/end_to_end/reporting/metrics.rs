//! Metrics for Prometheus: the file of a textfile collector, and the endpoint.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use crate::harness::{Place, UNTIL_GO, apply, as_root, code, stderr, wait_until};

/// Returns the value of a metric in a text; a label besides the store may be given.
fn figure(text: &str, name: &str, label: &str) -> Option<f64> {
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("{name}{{")) && line.contains(label))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// Returns the reported address of the endpoint.
fn address(place: &Place) -> String {
    place.wait_for("err", "/metrics");
    let err = place.text("err");
    let (_, rest) = err.split_once("http://").unwrap();
    rest.split('/').next().unwrap().to_owned()
}

/// Sends a request to the endpoint; returns its reply.
fn ask(address: &str, request: &[u8]) -> String {
    let mut connection = TcpStream::connect(address).unwrap();
    // The endpoint may have closed the connection already.
    let _ = connection.write_all(request);
    let _ = connection.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let _ = connection.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

#[apply(as_root)]
fn the_file_follows_the_run_and_keeps_its_end() {
    let place = Place::new();
    let settings = "[metrics]\ntextfile = 'run.prom'\n[restart]\nbackoff = '50ms'\n";
    fs::write(place.file("ckpt-run.toml"), settings).unwrap();
    let mut run = place.start_ready(&["--interval", "1h"]);
    wait_until("the state is told", || {
        figure(&place.text("run.prom"), "ckpt_run_state", "\"running\"") == Some(1.0)
    });
    let text = place.text("run.prom");
    assert_eq!(figure(&text, "ckpt_run_up", ""), Some(1.0));
    assert_eq!(figure(&text, "ckpt_run_snapshots_total", ""), Some(0.0));
    assert_eq!(
        figure(&text, "ckpt_run_snapshot_interval_seconds", ""),
        Some(3600.0)
    );
    assert_eq!(
        figure(&text, "ckpt_run_last_snapshot_timestamp_seconds", ""),
        None
    );
    let store = fs::canonicalize(place.file(".ckpt-run")).unwrap();
    assert!(
        text.contains(&format!("store=\"{}\"", store.display())),
        "{text}"
    );

    place.snapshot();
    wait_until("the snapshot is told", || {
        figure(&place.text("run.prom"), "ckpt_run_snapshots_total", "") == Some(1.0)
    });
    run.crash();
    wait_until("the restore is told", || {
        figure(&place.text("run.prom"), "ckpt_run_restores_total", "") == Some(1.0)
    });
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let text = place.text("run.prom");
    assert_eq!(figure(&text, "ckpt_run_up", ""), Some(0.0));
    assert_eq!(figure(&text, "ckpt_run_state", "\"finished\""), Some(1.0));
    assert_eq!(figure(&text, "ckpt_run_exit_code", ""), Some(0.0));
    assert_eq!(figure(&text, "ckpt_run_crashes_total", ""), Some(1.0));
    assert_eq!(
        figure(&text, "ckpt_run_snapshot_freeze_seconds_count", ""),
        Some(1.0)
    );
    assert!(figure(&text, "ckpt_run_last_snapshot_raw_bytes", "").unwrap() > 0.0);
}

#[apply(as_root)]
fn the_endpoint_answers_scrapers_and_shrugs_off_the_rest() {
    let place = Place::new();
    fs::write(
        place.file("ckpt-run.toml"),
        "[metrics]\nlisten = '127.0.0.1:0'\n",
    )
    .unwrap();
    let mut run = place.start_ready(&[]);
    let address = address(&place);
    let mut good = String::new();
    wait_until("its start", || {
        good = ask(
            &address,
            b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
        );
        figure(&good, "ckpt_run_state", "\"running\"") == Some(1.0)
    });
    assert!(good.starts_with("HTTP/1.1 200 OK\r\n"), "{good}");
    assert!(
        good.contains("Content-Type: text/plain; version=0.0.4"),
        "{good}"
    );
    let (head, body) = good.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(&format!("Content-Length: {}", body.len())));
    assert_eq!(figure(body, "ckpt_run_state", "\"running\""), Some(1.0));

    for (request, answer) in [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "HTTP/1.1 404"),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n".to_vec(), "HTTP/1.1 405"),
        (b"\x16\x03\x01\x02\x00\x01".to_vec(), "HTTP/1.1 400"),
        (b"GET /metrics HTTP/1.1\r\n".to_vec(), "HTTP/1.1 400"),
    ] {
        let said = ask(&address, &request);
        assert!(said.starts_with(answer), "{said}");
    }
    // Longer than any request; the reply may be lost with the unread data.
    let said = ask(&address, &vec![b'x'; 1 << 20]);
    assert!(
        said.is_empty() || said.starts_with("HTTP/1.1 400"),
        "{said}"
    );
    let said = ask(
        &address,
        b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    );
    assert!(said.starts_with("HTTP/1.1 403"), "{said}");
    // Silent connections exclude no other: one more closes the oldest, and the time limit closes all.
    let silent: Vec<TcpStream> = (0..40)
        .map(|_| TcpStream::connect(&address).unwrap())
        .collect();
    let good = ask(&address, b"GET /metrics HTTP/1.1\r\n\r\n");
    assert!(good.starts_with("HTTP/1.1 200 OK\r\n"), "{good}");
    let mut ended = Vec::new();
    for mut connection in &silent {
        connection.set_nonblocking(true).unwrap();
        ended.push(matches!(connection.read(&mut [0]), Ok(0)));
    }
    assert!(ended[0] && !ended[39], "{ended:?}");
    drop(silent);

    // A second run cannot use the same address, and runs nevertheless.
    let other = Place::new();
    fs::write(
        other.file("ckpt-run.toml"),
        format!("[metrics]\nlisten = '{address}'\n"),
    )
    .unwrap();
    assert_eq!(other.start(&[], &["true"]).wait(), 0);
    assert!(
        other.text("err").contains("cannot serve metrics"),
        "{}",
        other.text("err")
    );

    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root)]
fn an_address_of_others_is_refused_unless_they_are_allowed() {
    let place = Place::new();
    fs::write(
        place.file("ckpt-run.toml"),
        "[metrics]\nlisten = '0.0.0.0:0'\n",
    )
    .unwrap();
    let refused = place.verb(&["--", "true"]);
    assert_eq!(code(refused.status), 125);
    assert!(
        stderr(&refused).contains("metrics.allow_remote"),
        "{}",
        stderr(&refused)
    );
    assert!(!place.file(".ckpt-run").exists(), "nothing was touched");
    let allowed = place
        .command(&["--", "true"])
        .env("CKPT_RUN_METRICS_ALLOW_REMOTE", "true")
        .output()
        .unwrap();
    assert_eq!(code(allowed.status), 0, "{}", stderr(&allowed));
}

#[apply(as_root)]
fn a_file_that_cannot_be_written_is_a_warning_once() {
    let place = Place::new();
    fs::write(
        place.file("ckpt-run.toml"),
        "[metrics]\ntextfile = 'no/run.prom'\n",
    )
    .unwrap();
    let mut run = place.start_python(&[], UNTIL_GO);
    place.wait_for("err", "cannot write the metrics");
    place.snapshot();
    place.go();
    assert_eq!(run.wait(), 0);
    let err = place.text("err");
    assert_eq!(err.matches("cannot write the metrics").count(), 1, "{err}");
}
