//! The loop of the view: reads new metrics every second, draws, and handles keys.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use super::app::{AppControl, WatchApp};
use super::view::draw;

/// Time between two reads of the files.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);
/// Longest wait for a key, after which a signal is noticed.
const KEY_WAIT: Duration = Duration::from_millis(200);

/// Shows a run in the terminal until the user quits.
pub fn watch(path: &Path) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGTERM, libc::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("failed to watch for signals")?;
    }
    let mut app = WatchApp::new(path);
    let mut terminal = ratatui::try_init().context("failed to open the terminal; --once prints a summary instead")?;
    let ended = run(&mut terminal, &mut app, &stop);
    ratatui::restore();
    ended
}

fn run(terminal: &mut DefaultTerminal, app: &mut WatchApp, stop: &AtomicBool) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        app.update(SystemTime::now());
        let next = Instant::now() + UPDATE_INTERVAL;
        while Instant::now() < next && !stop.load(Ordering::Relaxed) {
            terminal.draw(|frame| draw(frame, app)).context("failed to draw")?;
            let wait = next.saturating_duration_since(Instant::now()).min(KEY_WAIT);
            if event::poll(wait).context("failed to wait for keys")? && handle_events(app)? == AppControl::Quit {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Handles the events that are ready. After a resize, the next drawing has the new size.
fn handle_events(app: &mut WatchApp) -> Result<AppControl> {
    while event::poll(Duration::ZERO)? {
        if let Event::Key(key) = event::read().context("failed to read a key")?
            && key.kind == KeyEventKind::Press
            && app.press(key) == AppControl::Quit
        {
            return Ok(AppControl::Quit);
        }
    }
    Ok(AppControl::Continue)
}
