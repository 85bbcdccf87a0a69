//! Test of `ckpt-run report`: a browser renders the page without errors, whatever the job's name is.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::harness::{ON_REQUEST, Place, UNTIL_GO, apply, as_root, code, skip, stderr, stdout};

/// Command-line argument that would be a script if it were not escaped.
const HOSTILE: &str =
    r#"</title><script>document.title="owned"</script><img src=x onerror=alert(1)>"#;

/// Creates a run with two snapshots, a crash, a pause and a failed snapshot.
fn eventful(place: &Place) {
    fs::write(place.file("job.py"), UNTIL_GO).unwrap();
    fs::write(
        place.file("ckpt-run.toml"),
        "[restart]\nbackoff = '300ms'\n",
    )
    .unwrap();
    let line = ["python3", "-u", "job.py", HOSTILE];
    let mut run = place.start(&ON_REQUEST, &line);
    place.wait_for("out", "ready");
    place.snapshot();
    run.crash();
    place.wait_for("err", "ckpt-run: restored");
    assert!(place.verb(&["pause"]).status.success());
    assert!(place.verb(&["unpause", "--wait"]).status.success());
    place.snapshot();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

fn chromium() -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&folders).map(|folder| folder.join("chromium"));
    let found = found.into_iter().find(|path| path.is_file());
    if found.is_none() {
        skip("what a browser makes of the report needs chromium");
    }
    found
}

fn browse(chromium: &PathBuf, place: &Place, page: &str) -> (String, String) {
    let output = Command::new(chromium)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--virtual-time-budget=5000",
        ])
        .arg(format!(
            "--user-data-dir={}",
            place.file("profile").display()
        ))
        .args(["--window-size=1500,1000", "--dump-dom"])
        .arg(format!("file://{}", place.file(page).display()))
        .output()
        .expect("chromium starts");
    (stdout(&output), stderr(&output))
}

#[apply(as_root)]
fn browser_renders_the_report_on_small_and_large_screens() {
    let place = Place::new();
    eventful(&place);
    let output = place.verb(&["report", "-o", "run.html"]);
    assert_eq!(code(output.status), 0, "{}", stderr(&output));
    assert_eq!(
        (stdout(&output), stderr(&output)),
        (String::new(), String::new())
    );
    let page = place.text("run.html");
    assert!(!page.contains("<script") && page.contains("&lt;script&gt;"));
    assert!(page.contains("1 of 1"), "a crash survived");
    let Some(chromium) = chromium() else { return };

    let (dom, said) = browse(&chromium, &place, "run.html");
    assert!(
        dom.contains("<title>ckpt-run: python3 -u job.py &lt;/title&gt;"),
        "{dom}"
    );
    assert!(!said.contains("CONSOLE"), "{said}");

    // Rendered in frames of both widths, whose content is measured from outside.
    let text = page.replace('&', "&amp;").replace('"', "&quot;");
    let frames = [360, 1400]
        .map(|width| format!("<iframe width={width} height=900 srcdoc=\"{text}\"></iframe>"));
    let measure = r"
<script>
onload = () => document.body.dataset.found = JSON.stringify([...document.querySelectorAll('iframe')].map(frame => {
  const inside = frame.contentDocument, box = one => { const b = one.getBoundingClientRect(); return [b.width, b.height]; };
  return {
    wide: inside.documentElement.scrollWidth, charts: [...inside.querySelectorAll('svg.chart')].map(box),
    drawn: [...inside.querySelectorAll('svg.chart rect, svg.chart circle')].map(box),
    text: parseFloat(getComputedStyle(inside.querySelector('svg.chart text')).fontSize),
  };
}));
</script>";
    fs::write(
        place.file("frames.html"),
        format!("<body>{}{measure}", frames.concat()),
    )
    .unwrap();
    let (dom, said) = browse(&chromium, &place, "frames.html");
    let found = dom
        .split("data-found=\"")
        .nth(1)
        .and_then(|rest| rest.split('"').next());
    let found = found
        .unwrap_or_else(|| panic!("not measured: {said}"))
        .replace("&quot;", "\"");
    let found: Vec<Value> = serde_json::from_str(&found).unwrap();
    for (frame, width) in found.iter().zip([360.0, 1400.0]) {
        assert!(
            frame["wide"].as_f64().unwrap() <= width,
            "it scrolls sideways: {frame}"
        );
        assert!(frame["text"].as_f64().unwrap() >= 12.0);
        assert_eq!(frame["charts"].as_array().unwrap().len(), 4, "{frame}");
        for boxes in ["charts", "drawn"] {
            for size in frame[boxes].as_array().unwrap() {
                let seen = size[0].as_f64().unwrap() > 0.0 && size[1].as_f64().unwrap() > 0.0;
                assert!(seen, "nothing is drawn: {frame}");
            }
        }
    }
}

#[apply(as_root)]
fn report_goes_to_stdout_and_needs_a_run() {
    let place = Place::new();
    let nothing = place.verb(&["report"]);
    assert_eq!(code(nothing.status), 125);
    assert!(
        stderr(&nothing).contains("has no events of a run"),
        "{}",
        stderr(&nothing)
    );
    assert_eq!(place.start(&[], &["true"]).wait(), 0);
    assert!(stdout(&place.verb(&["report"])).starts_with("<!DOCTYPE html>"));
    let json: Value = serde_json::from_slice(&place.verb(&["report", "--json"]).stdout).unwrap();
    assert_eq!(
        (&json["command"][0], &json["ended"][1]),
        (&"true".into(), &0.into())
    );
    let nowhere = place.verb(&["report", "-o", "no/such/folder/x.html"]);
    assert!(
        stderr(&nowhere).contains("cannot write no/such/folder/x.html"),
        "{}",
        stderr(&nowhere)
    );
}
