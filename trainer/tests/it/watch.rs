//! `trainer watch`: contents of the screen, keys, and the summary for scripts.

use std::process::Command;
use std::time::{Duration, SystemTime};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::{Value, json};
use trainer::watch::{AppControl, WatchApp, draw};

use crate::run_files::{RunFolder, eval, finished, step, step_of_experts};
use crate::support::{Run, stderr};

/// The time of the screens: ten seconds after the last update of run.json.
fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_793_530_810)
}

fn press(app: &mut WatchApp, code: KeyCode) -> AppControl {
    app.press(KeyEvent::new(code, KeyModifiers::NONE))
}

/// Draws the view and returns the lines of the screen.
fn screen(app: &WatchApp, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, app)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let line = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(line).collect::<Vec<_>>().join("\n")
}

/// Returns the view of a run with 100 of 400 steps.
fn watched(folder: &RunFolder, exit: Value) -> WatchApp {
    folder.save(exit);
    folder.log(&[eval(0, 4.25)]);
    folder.log(&(1..=100).map(step_of_experts).collect::<Vec<_>>());
    folder.log(&[eval(100, 1.5)]);
    let mut app = WatchApp::new(&folder.path());
    app.update(now());
    app
}

#[track_caller]
fn check(screen: &str, words: &[&str]) {
    words.iter().for_each(|word| assert!(screen.contains(word), "no {word:?} on\n{screen}"));
}

#[test]
fn the_screen_of_a_running_run_has_its_progress_and_all_metrics() {
    let folder = RunFolder::new("tiny");
    let app = watched(&folder, Value::Null);
    let screen = screen(&app, 120, 40);
    check(&screen, &["tiny  running", "step 100 of 400 (25%)  ETA 0:02:30"]);
    check(&screen, &["134.52M parameters", "2 ranks", "100.00K tokens", "updated 10s ago"]);
    check(&screen, &["Loss", "1.3333  eval 1.5000", "Learning rate", "1.000e-3", "Gradient norm", "1.5000"]);
    check(&screen, &["Throughput", "2.00K", "Memory", "2.10 GB", "Model FLOPs utilization", "41.0%"]);
    check(&screen, &["Expert balance", "2.5000", "Expert selections", "90.0%", "unused 12.5%", "━━━━━━━━"]);
    check(&screen, &["Auxiliary losses", "1.2500", "q quit", "l scale: linear", "s smoothing: 0.6", "x axis: step"]);
    let n_braille = screen.chars().filter(|c| ('\u{2801}'..='\u{28ff}').contains(c)).count();
    assert!(n_braille > 60, "a curve is drawn:\n{screen}");
}

#[test]
fn panels_of_experts_are_shown_only_for_a_run_that_logs_them() {
    let folder = RunFolder::new("dense");
    folder.save(Value::Null);
    folder.log(&[step(1), step(2)]);
    let mut app = WatchApp::new(&folder.path());
    app.update(now());
    let screen = screen(&app, 120, 40);
    check(&screen, &["Loss", "Memory"]);
    assert!(!screen.contains("Expert") && !screen.contains("Auxiliary") && !screen.contains("eval"), "{screen}");
}

#[test]
fn keys_select_the_chart_the_scale_the_smoothing_and_the_axis() {
    let folder = RunFolder::new("tiny");
    let mut app = watched(&folder, Value::Null);
    check(&screen(&app, 100, 30), &["┌Loss"]);
    assert_eq!(press(&mut app, KeyCode::Tab), AppControl::Continue);
    check(&screen(&app, 100, 30), &["┌Auxiliary losses"]);
    press(&mut app, KeyCode::Right);
    check(&screen(&app, 100, 30), &["┌Learning rate"]);
    for _ in 0..3 {
        press(&mut app, KeyCode::Left);
    }
    check(&screen(&app, 100, 30), &["┌Expert selections"]);
    press(&mut app, KeyCode::Char('l'));
    press(&mut app, KeyCode::Char('s'));
    press(&mut app, KeyCode::Char('x'));
    let tokens = screen(&app, 100, 30);
    check(&tokens, &["l scale: log", "s smoothing: 0.9", "x axis: tokens", "100.00K"]);
    press(&mut app, KeyCode::Char('x'));
    check(&screen(&app, 100, 30), &["x axis: training time", "0:00:50"]);
    for code in [KeyCode::Char('q'), KeyCode::Esc] {
        assert_eq!(press(&mut app, code), AppControl::Quit);
    }
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(app.press(interrupt), AppControl::Quit);
}

#[test]
fn the_scale_and_the_smoothing_change_the_curve() {
    let folder = RunFolder::new("tiny");
    let mut app = watched(&folder, Value::Null);
    let mut screens = vec![screen(&app, 100, 30)];
    for key in ['l', 's', 's', 's'] {
        press(&mut app, KeyCode::Char(key));
        let chart = |screen: &str| screen.lines().take(20).collect::<String>();
        let next = screen(&app, 100, 30);
        assert_ne!(chart(&next), chart(screens.last().unwrap()), "{key}");
        screens.push(next);
    }
}

#[test]
fn a_view_of_a_run_that_has_not_started_waits_for_it() {
    let folder = RunFolder::new("later");
    let path = folder.path();
    std::fs::remove_dir(&path).unwrap();
    let mut app = WatchApp::new(&path);
    app.update(now());
    let text = screen(&app, 200, 20);
    check(
        &text,
        &["later  waiting", "Waiting for", "run.json and", "metrics.jsonl. The view starts when a run writes"],
    );
    std::fs::create_dir(&path).unwrap();
    folder.save(Value::Null);
    app.update(now());
    check(&screen(&app, 200, 20), &["later  running", "No records in"]);
    folder.log(&[step(1)]);
    app.update(now());
    check(&screen(&app, 200, 20), &["step 1 of 400 (0%)", "Loss"]);
    folder.log(&[step(2)]);
    app.update(now());
    check(&screen(&app, 200, 20), &["step 2 of 400 (0%)"]);
}

#[test]
fn the_end_of_a_run_is_shown_with_its_error() {
    let of = |exit: Value| screen(&watched(&RunFolder::new("tiny"), exit), 120, 40);
    check(&of(finished()), &["tiny  finished", "all steps are done"]);
    check(&of(json!({"code": 75, "reason": "stopped by SIGTERM"})), &["tiny  stopped", "stopped by SIGTERM"]);
    let failed = of(json!({"code": 5, "reason": "the loss is not finite\u{1b}[2J (train.jsonl:81)"}));
    check(&failed, &["tiny  failed", "failed exit code 5: the loss is not finite\\u001b[2J (train.jsonl:81)"]);
    assert!(!failed.contains("ETA"), "{failed}");
    let folder = RunFolder::new("tiny");
    let mut app = watched(&folder, Value::Null);
    app.update(now() + Duration::from_secs(600));
    check(&screen(&app, 120, 40), &["tiny  no update", "for 0:10:10, and no end in run.json"]);
}

#[test]
fn every_size_of_a_terminal_is_drawn() {
    let folder = RunFolder::new("tiny");
    let mut app = watched(&folder, json!({"code": 1, "reason": "word ".repeat(200)}));
    for (width, height) in [(1, 1), (3, 2), (10, 3), (20, 5), (40, 8), (79, 12), (80, 24), (30, 60), (300, 100)] {
        screen(&app, width, height);
    }
    let mut titles = Vec::new();
    for _ in 0..N_CHARTS {
        screen(&app, 20, 7);
        titles.push(screen(&app, 80, 24).split('┌').nth(1).unwrap().split('─').next().unwrap().to_owned());
        press(&mut app, KeyCode::Tab);
    }
    titles.sort();
    titles.dedup();
    assert_eq!(titles.len(), N_CHARTS, "{titles:?}");
    check(&screen(&app, 80, 24), &["tiny  failed", "┌Loss", "q quit"]);
}

/// Charts of a model with experts.
const N_CHARTS: usize = 11;

#[test]
fn losses_that_are_not_finite_do_not_hide_the_others() {
    let folder = RunFolder::new("tiny");
    folder.save(Value::Null);
    let mut bad = step(3);
    bad["loss"] = Value::Null;
    folder.log(&[step(1), step(2), bad.clone()]);
    let mut app = WatchApp::new(&folder.path());
    app.update(now());
    check(&screen(&app, 120, 40), &["not finite", "┌Loss", "3.9"]);
    let alone = RunFolder::new("alone");
    alone.save(Value::Null);
    alone.log(&[bad]);
    let mut app = WatchApp::new(&alone.path());
    app.update(now());
    check(&screen(&app, 120, 40), &["no finite values for this scale"]);
}

#[test]
fn a_broken_run_json_is_shown_and_read_again() {
    let folder = RunFolder::new("tiny");
    let mut app = watched(&folder, Value::Null);
    folder.write("run.json", "{\"exit\":");
    app.update(now());
    check(&screen(&app, 200, 40), &["failed to read", "run.json"]);
    folder.save(Value::Null);
    app.update(now());
    assert!(!screen(&app, 200, 40).contains("failed to read"));
}

fn watch(arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.arg("watch").args(arguments).env_remove("RUST_BACKTRACE").env_remove("RUST_LOG");
    command.output().unwrap()
}

#[test]
fn without_a_terminal_one_summary_is_printed() {
    let run = Run::new();
    run.train_ok(&["train_iters=3", "eval_interval=3"]);
    let folder = run.path().join("run");
    let folder = folder.to_str().unwrap();
    let [once, piped] = [&[folder, "--once"][..], &[folder]].map(watch);
    assert!(once.status.success(), "{}", stderr(&once));
    assert_eq!(once.stdout, piped.stdout);
    let text = String::from_utf8(once.stdout).unwrap();
    let line = |label: &str| {
        let line =
            text.lines().find_map(|line| line.strip_prefix(label)).unwrap_or_else(|| panic!("no {label}:\n{text}"));
        line.trim().to_owned()
    };
    assert_eq!(line("status"), "finished: all steps are done");
    assert_eq!(line("steps"), "3 of 3 (100%)");
    assert_eq!(line("Train loss, last step"), format!("{:.4}", run.losses()[2]));
    assert!(!text.contains("remaining"));
}

#[test]
fn a_summary_of_a_run_that_does_not_exist_is_an_error() {
    let output = watch(&["none/run", "--once"]);
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(text.contains("failed to read the run none/run") && text.contains("expected the output_dir"), "{text}");
}
