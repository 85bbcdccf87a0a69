//! `status --watch` on a terminal: queries the run every second and draws it until the user quits.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use jiff::tz::TimeZone;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use super::view::{View, draw};
use super::{LOOK_INTERVAL, look};
use crate::cli::global::Failure;
use crate::clock;
use crate::history::{self, Entry};
use crate::supervisor::Status;

/// Limit on the wait for a key, and thereby on the delay until a new status is drawn or a signal ends the view.
const KEY_WAIT: Duration = Duration::from_millis(100);
/// Signals that end the view; the terminal must be restored first.
const SIGNALS: [i32; 4] = [
    signal_hook::consts::SIGINT,
    signal_hook::consts::SIGTERM,
    signal_hook::consts::SIGHUP,
    signal_hook::consts::SIGQUIT,
];

/// The result of one query of the run.
type Look = (Result<Status, String>, Vec<Entry>);

/// Shows the run until the user quits; returns its last status.
pub(super) fn run(store: &Path) -> Result<Status, Failure> {
    // The first query comes before the terminal changes, so that an error appears on the normal screen.
    let status = look(store)?;
    let ended = Arc::new(AtomicBool::new(false));
    for signal in SIGNALS {
        signal_hook::flag::register(signal, Arc::clone(&ended))?;
    }
    let colors = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut view = View {
        status,
        events: history::latest(&history::path(store)),
        trouble: None,
        now: clock::timestamp(),
        zone: TimeZone::system(),
        colors,
    };
    let looks = looks_at(store.to_owned())?;
    let mut terminal = ratatui::try_init()?;
    let shown = show(&mut terminal, &mut view, &looks, &ended);
    let restored = ratatui::try_restore();
    shown?;
    restored?;
    Ok(view.status)
}

/// Queries the run repeatedly on a thread. A stopped supervisor does not answer, and keys are handled anyway.
fn looks_at(store: PathBuf) -> io::Result<Receiver<Look>> {
    let (sender, receiver) = sync_channel(1);
    let watch = move |sender: SyncSender<Look>| {
        loop {
            thread::sleep(LOOK_INTERVAL);
            let status = look(&store).map_err(|failure| failure.text);
            let events = history::latest(&history::path(&store));
            if sender.send((status, events)).is_err() {
                return; // the view was closed
            }
        }
    };
    thread::Builder::new()
        .name("look".to_owned())
        .spawn(move || watch(sender))?;
    Ok(receiver)
}

fn show(
    terminal: &mut DefaultTerminal,
    view: &mut View,
    looks: &Receiver<Look>,
    ended: &AtomicBool,
) -> io::Result<()> {
    terminal.draw(|frame| draw(frame, view))?;
    while !ended.load(Ordering::Relaxed) {
        let mut changed = false;
        if event::poll(KEY_WAIT)? {
            let event = event::read()?;
            if quits(&event) {
                return Ok(());
            }
            changed = matches!(event, Event::Resize(..));
        }
        if let Ok((status, events)) = looks.try_recv() {
            (view.events, view.now) = (events, clock::timestamp());
            view.trouble = match status {
                Ok(status) => {
                    view.status = status;
                    None
                }
                Err(trouble) => Some(trouble),
            };
            changed = true;
        }
        if changed {
            terminal.draw(|frame| draw(frame, view))?;
        }
    }
    Ok(())
}

fn quits(event: &Event) -> bool {
    let Event::Key(key) = event else {
        return false;
    };
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind != KeyEventKind::Release
        && match key.code {
            KeyCode::Char('q' | 'Q') | KeyCode::Esc => true,
            KeyCode::Char('c' | 'd') => control,
            _ => false,
        }
}

#[cfg(test)]
mod tests {
    use ratatui::crossterm::event::KeyEvent;

    use super::*;

    #[test]
    fn q_esc_and_control_c_quit_and_nothing_else() {
        let key = |code, modifiers| quits(&Event::Key(KeyEvent::new(code, modifiers)));
        assert!(key(KeyCode::Char('q'), KeyModifiers::NONE));
        assert!(key(KeyCode::Esc, KeyModifiers::NONE));
        assert!(key(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(!key(KeyCode::Char('c'), KeyModifiers::NONE));
        assert!(!key(KeyCode::Enter, KeyModifiers::NONE));
        assert!(!quits(&Event::Resize(3, 4)));
    }
}
