//! `trainer report`: the page and its numbers, and what a browser displays.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use candlewick_html::browser::{Browser, OpenedPage, texts};
use serde_json::{Value, json};

use crate::run_files::{RunFolder, eval, finished, read, step, step_of_experts};
use crate::support::{Run, stderr};

fn report(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.arg("report").args(arguments).env_remove("RUST_BACKTRACE").env_remove("RUST_LOG");
    command.output().unwrap()
}

/// Writes the report of a folder, and returns it.
#[track_caller]
fn page_of(folder: &Path) -> String {
    let output = report(&[folder.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let path = folder.join("report.html");
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("wrote {}\n", path.display()));
    read(&path)
}

#[track_caller]
fn numbers_of(folders: &[&Path]) -> Value {
    let paths: Vec<&str> = folders.iter().map(|path| path.to_str().unwrap()).collect();
    let output = report(&[&paths[..], &["--json"]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the data of the charts in a page.
fn curves(page: &str) -> Value {
    let data = page.split("id=\"curves-data\">").nth(1).unwrap().split("</script>").next().unwrap();
    serde_json::from_str(data).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Checks the message and the exit code of a report that fails.
#[track_caller]
fn check_error(arguments: &[&str], code: i32, words: &[&str]) {
    let output = report(arguments);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    words.iter().for_each(|word| assert!(text.contains(word), "no {word:?} in {text}"));
}

#[test]
fn a_report_of_a_training_run_has_its_curves_and_numbers() {
    let run = Run::new();
    run.train_ok(&[]);
    let folder = run.path().join("run");
    let page = page_of(&folder);
    for outside in ["src=", "<link", "@import", "https://", "fetch(", "XMLHttpRequest"] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert_eq!(page.matches("http://").count(), page.matches("http://www.w3.org/2000/svg").count());
    let losses: Vec<f64> = run.losses();
    let shown = numbers(&curves(&page)["runs"][0]["series"]["loss"]["value"]);
    assert_eq!(shown.len(), losses.len());
    assert!(shown.iter().zip(&losses).all(|(shown, loss)| (shown - loss).abs() < 1e-6 * loss), "{shown:?} {losses:?}");
    let found = &numbers_of(&[&folder])["runs"][0];
    assert_eq!(numbers(&found["series"]["loss"]["value"]), losses);
    assert_eq!(
        (&found["status"], &found["steps_done"], &found["total_steps"]),
        (&json!("finished"), &json!(24), &json!(24))
    );
    let trained = run.report()["ledger"]["seen"]["read"]["tokens"].as_f64().unwrap();
    assert_eq!(numbers(&found["axis"]["tokens"]).last(), Some(&trained));
    let eval = run.metrics().iter().rev().find_map(|record| record["loss/eval"].as_f64()).unwrap();
    assert!(page.contains(&format!("<dt>Eval loss, final</dt><dd>{eval:.4}</dd>")), "{page}");
    assert!(page.contains("optimizer.learning_rate") && page.contains("recipe.yaml:"), "settings have their origin");
    assert!(page.contains("supervised: the loss is computed") && page.contains("Checkpoints and resumes: "));
    let again = page_of(&folder);
    assert_eq!(again.len(), page.len(), "a report replaces the earlier one");
}

#[test]
fn experts_by_layer_have_their_logits_and_losses_if_the_records_have_them() {
    let folder = RunFolder::new("run");
    folder.save(finished());
    folder.log(&(1..=3).map(step_of_experts).collect::<Vec<_>>());
    let page = page_of(&folder.path());
    let cell = |text: &str| format!("<td class=\"number\">{text}</td>");
    let row = ["3", "2.500", "0.900", "0.0%", "0.0%", "-0.500", "1.750", "0.1250"].map(cell).concat();
    assert!(page.contains(&row), "{page}");
    for column in ["Mean of logits", "Std of logits", "z_loss"] {
        assert!(page.contains(&format!("<th scope=\"col\" class=\"number\">{column}</th>")), "{column}");
    }
    let mut record = step_of_experts(1);
    record["expert_load"]["layers"] = serde_json::json!([{"layer": 3, "max_over_mean": 2.5, "entropy": 0.9}]);
    let earlier = RunFolder::new("run");
    earlier.save(finished());
    earlier.log(&[record]);
    let page = page_of(&earlier.path());
    let row = ["3", "2.500", "0.900", "0.0%", "0.0%"].map(cell).concat();
    assert!(page.contains(&format!("<tr>{row}</tr>")) && !page.contains("of logits"), "{page}");
}

#[test]
fn a_browser_draws_the_curves_of_several_runs() {
    let Some(browser) = Browser::find() else { return };
    let [first, second] = ["first", "second"].map(RunFolder::new);
    for folder in [&first, &second] {
        folder.save(finished());
        folder.log(&(1..=40).map(step_of_experts).collect::<Vec<_>>());
        folder.log(&[eval(20, 3.0), eval(40, 2.5)]);
    }
    let page = first.path().join("both.html");
    let paths = [first.path(), second.path()];
    let [a, b] = paths.each_ref().map(|path| path.to_str().unwrap());
    let output = report(&[a, b, "--output", page.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    for fragment in ["", "#x=tokens&y=log&smoothing=0.9", "#x=time&smoothing=0"] {
        let OpenedPage { dom, console } = browser.open(&page, fragment);
        assert_eq!(console, [""; 0], "{fragment}");
        let curves = |key: &str| dom.matches(&format!("data-key=\"{key}\"")).count();
        for key in ["loss", "loss/eval", "lr", "grad_norm", "tokens_per_second", "rss_bytes", "mfu"] {
            assert_eq!(curves(key), 2, "{fragment}: {key}");
        }
        assert_eq!([curves("expert_load/max_over_mean"), curves("auxiliary_losses/load_balancing_loss")], [2, 2]);
        assert_eq!(points_of(&dom, "loss"), [40, 40], "{fragment}");
        assert_eq!(points_of(&dom, "loss/eval"), [2, 2], "{fragment}");
        let titles = texts(&dom, "<figcaption");
        assert!(titles[0].contains("Loss") && titles.iter().any(|title| title == "Expert balance"), "{titles:?}");
    }
    let dom = browser.dom(&page, "");
    assert_eq!(texts(&dom, "<button type=\"button\" aria-pressed"), ["first", "second"]);
    let tokens = browser.dom(&page, "#x=tokens");
    assert!(dom.contains(">40</text>") && tokens.contains(">40K</text>"), "the axes have labels");
}

/// Script that drags over the first half of the first chart, and then points at its right edge.
const POINTER: &str = "<script>setTimeout(() => {
    const svg = document.querySelector('.chart svg'), box = svg.getBoundingClientRect();
    const send = (name, part) => svg.dispatchEvent(
        new PointerEvent(name, { button: 0, clientX: box.left + part * box.width, clientY: box.top + 50 }));
    send('pointermove', 1);
    document.querySelector('.readout').after(document.querySelector('.readout').cloneNode(true));
    send('pointerdown', 0); send('pointermove', 0.5); send('pointerup', 0.5);
}, 500)</script>";

#[test]
fn the_pointer_reads_out_values_and_enlarges_a_part() {
    let Some(browser) = Browser::find() else { return };
    let folder = RunFolder::new("run");
    folder.save(finished());
    folder.log(&(1..=401).map(step).collect::<Vec<_>>());
    let page = page_of(&folder.path());
    let page = folder.write("pointer.html", page.replace("</body>", &format!("{POINTER}</body>")));
    let OpenedPage { dom, console } = browser.open(&page, "#smoothing=0.5");
    assert_eq!(console, [""; 0]);
    let readouts = texts(&dom, "<div class=\"readout\"");
    let last = 4.0 / (1.0 + 401.0 / 50.0);
    assert!(readouts[1].starts_with("step 401train: ") && readouts[1].contains(", smoothed "), "{readouts:?}");
    assert!(readouts[1].contains(&format!("train: {last:.5}")), "{readouts:?}");
    let labels = texts(&dom, "<text ");
    assert!(!labels.contains(&"400".to_owned()) && labels.contains(&"150".to_owned()), "{labels:?}");
    assert!(dom.contains("<button type=\"button\" class=\"unzoom\">"), "the selection can be removed");
}

/// Returns the number of points of each curve of a metric.
fn points_of(dom: &str, key: &str) -> Vec<usize> {
    let curves =
        dom.split("<path class=\"curve\" ").skip(1).filter(|rest| rest.contains(&format!("data-key=\"{key}\" ")));
    let shapes = curves.map(|rest| rest.split(" d=\"").nth(1).unwrap().split('"').next().unwrap());
    shapes.map(|shape| shape.matches(['M', 'L']).count()).collect()
}

#[test]
fn two_runs_are_compared_by_settings_and_best_values() {
    let [slow, fast] = ["slow", "fast"].map(RunFolder::new);
    for (folder, loss) in [(&slow, 3.0), (&fast, 2.0)] {
        folder.save(finished());
        folder.log(&[step(1), step(2), eval(1, 2.5), eval(2, loss)]);
    }
    let output = slow.path().join("both.html");
    let arguments = [slow.path(), fast.path(), "--output".into(), output.clone()];
    assert!(report(&arguments.each_ref().map(|path| path.to_str().unwrap())).status.success());
    let page = read(&output);
    assert!(page.contains("<h1>Comparison of 2 runs</h1>"));
    let row = |page: &str, label: &str| {
        let row = page.split(&format!("<th scope=\"row\">{label}</th>")).nth(1).unwrap().split("</tr>").next().unwrap();
        row.trim().to_owned()
    };
    assert_eq!(row(&page, "Eval loss, final"), "<td class=\"number\">3.0000</td><td class=\"number best\">2.0000</td>");
    assert!(row(&page, "Eval loss, best").contains("2.5000 (step 1)</td><td class=\"number best\">2.0000 (step 2)"));
    assert!(!row(&page, "Step time, median").contains("best"), "equal values have no best");
    assert!(row(&page, "name").contains("slow</td>") && !page.contains("<th scope=\"row\">seed</th><td class"));
    let found = numbers_of(&[&slow.path(), &fast.path()]);
    assert_eq!(found["differences"], json!([{"key": "name", "values": ["slow", "fast"]}]));
    assert_eq!(found["runs"][1]["label"], "fast");
}

/// Scrolls the results to their end on a page of 400 pixels. The title says if the label and the last value are in view.
const NARROW: &str = "<script>addEventListener('load', () => {
    document.body.style.width = '400px';
    const table = document.querySelector('.results'), box = table.parentElement;
    box.scrollLeft = 1000;
    const [frame, label] = [box, table.querySelector('tbody th')].map(element => element.getBoundingClientRect());
    const value = [...table.querySelectorAll('tbody tr:first-child td')].pop().getBoundingClientRect();
    document.title = `${label.left >= frame.left - 1} ${value.right <= frame.right + 1} ${box.scrollLeft > 0}`;
});</script>";

#[test]
fn results_of_many_runs_scroll_on_a_narrow_screen_and_keep_their_labels() {
    let Some(browser) = Browser::find() else { return };
    let folders = ["first", "second", "third", "fourth", "fifth"].map(RunFolder::new);
    for folder in &folders {
        folder.save(finished());
        folder.log(&[step(1), step(2), eval(2, 3.0)]);
    }
    let output = folders[0].path().join("all.html");
    let paths: Vec<_> = folders.iter().map(RunFolder::path).chain(["--output".into(), output.clone()]).collect();
    assert!(report(&paths.iter().map(|path| path.to_str().unwrap()).collect::<Vec<_>>()).status.success());
    let page = folders[0].write("narrow.html", read(&output).replace("</body>", &format!("{NARROW}</body>")));
    let OpenedPage { dom, console } = browser.open(&page, "");
    assert_eq!((texts(&dom, "<title>"), console), (vec!["true true true".to_owned()], Vec::new()));
}

#[test]
fn runs_without_evaluations_or_with_one_row_or_without_rows_have_a_page() {
    let folder = RunFolder::new("run");
    folder.save(json!(null));
    assert!(page_of(&folder.path()).contains("has no step. train_log_iter_interval selects"));
    folder.log(&[step(1)]);
    let page = page_of(&folder.path());
    assert_eq!(curves(&page)["runs"][0]["series"]["loss"]["step"], json!([1]));
    assert!(
        !page.contains("Eval loss") && page.contains("<span class=\"status no-update\">no update</span>"),
        "{page}"
    );
    let Some(browser) = Browser::find() else { return };
    let OpenedPage { dom, console } = browser.open(&folder.path().join("report.html"), "");
    assert_eq!((points_of(&dom, "loss"), console), (vec![1], Vec::new()));
}

#[test]
fn metrics_without_a_run_json_have_a_page() {
    let folder = RunFolder::new("run");
    folder.log(&[step(1), step(2)]);
    let page = page_of(&folder.path());
    assert!(page.contains("run.json: settings, environment and token statistics are unknown"), "{page}");
    assert!(page.contains("<h1>run</h1>"));
}

#[test]
fn losses_that_are_not_finite_and_an_incomplete_last_line_are_marked_and_left_out() {
    let folder = RunFolder::new("run");
    folder.save(json!({"code": 5, "reason": "the loss of <b>step 3</b> is not finite"}));
    let mut bad = step(2);
    bad["loss"] = Value::Null;
    folder.log(&[step(1), bad, step(3)]);
    let text = read(&folder.path().join("metrics.jsonl"));
    folder.write("metrics.jsonl", text + "no record\n{\"iter\":4,\"loss\":1.0,\"lr");
    let page = page_of(&folder.path());
    let loss = &curves(&page)["runs"][0]["series"]["loss"];
    assert_eq!((&loss["step"], &loss["not_finite"]), (&json!([1, 3]), &json!([2])));
    assert!(page.contains("<dt>Losses that are not finite</dt><dd>1</dd>"));
    assert!(page.contains("1 line of") && page.contains("the first is line 4"), "{page}");
    assert!(page.contains("exit code 5: the loss of &lt;b&gt;step 3"));
    let Some(browser) = Browser::find() else { return };
    let OpenedPage { dom, console } = browser.open(&folder.path().join("report.html"), "");
    assert_eq!((dom.matches("class=\"not-finite\"").count(), console), (1, Vec::new()));
}

#[test]
fn a_resumed_run_has_each_step_once() {
    let folder = RunFolder::new("run");
    folder.save(finished());
    let resume = json!({"epoch": 0, "iter": 2, "resumed_from": "a/global_step_2", "resume_time": 0.5});
    let mut again = step(3);
    again["loss"] = json!(9.5);
    folder.log(&[step(1), step(2), step(3), step(4), resume, again]);
    let page = page_of(&folder.path());
    let run = &curves(&page)["runs"][0];
    assert_eq!((&run["series"]["loss"]["step"], &run["resumes"]), (&json!([1, 2, 3]), &json!([2])));
    assert_eq!(run["series"]["loss"]["value"][2], 9.5);
}

#[test]
fn a_long_run_is_downsampled_with_its_extremes() {
    let folder = RunFolder::new("run");
    folder.save(finished());
    let lines: String = (1..=120_000)
        .map(|iter| {
            let loss = if iter == 77_777 { 1234.5 } else { 2.0 };
            format!(
                "{{\"iter\":{iter},\"loss\":{loss},\"lr\":0.001,\"grad_norm\":1.0,\"tokens\":10,\"step_time\":0.1}}\n"
            )
        })
        .collect();
    folder.write("metrics.jsonl", lines);
    let page = page_of(&folder.path());
    assert!(page.len() < 500_000, "{}", page.len());
    let loss = &curves(&page)["runs"][0]["series"]["loss"];
    assert!(numbers(&loss["value"]).len() <= 1000 && numbers(&loss["high"]).contains(&1234.5));
    assert!(page.contains("The curves show 120,000 records as 1000 means"));
    let Some(browser) = Browser::find() else { return };
    let OpenedPage { dom, console } = browser.open(&folder.path().join("report.html"), "");
    // Loss, learning rate, gradient norm and step time.
    assert_eq!((dom.matches("class=\"band\"").count(), console), (4, Vec::new()));
}

#[test]
fn names_of_a_run_are_text_and_no_elements() {
    const EVIL: &str = "<script>document.title = 'run'</script>";
    let folder = RunFolder::new("run");
    folder.save(json!({"code": 1, "reason": EVIL}));
    let mut record = step(1);
    record["auxiliary_losses"] = json!({EVIL: 1.0});
    folder.log(&[record, json!({"iter": 1, "epoch": 0, "saved": EVIL, "save_time": 1.0})]);
    let page = page_of(&folder.path());
    assert!(!page.contains(EVIL) && page.contains("&lt;script&gt;"), "{page}");
    let Some(browser) = Browser::find() else { return };
    let OpenedPage { dom, console } = browser.open(&folder.path().join("report.html"), "");
    assert_eq!((texts(&dom, "<title>"), console), (vec!["run: training report".to_owned()], Vec::new()));
}

#[test]
fn errors_of_a_report_name_the_path_and_the_remedy() {
    let folder = RunFolder::new("run");
    folder.save(finished());
    folder.log(&[step(1)]);
    let path = folder.path();
    let [path, parent] = [path.to_str().unwrap(), path.parent().unwrap().to_str().unwrap()];
    check_error(&["none/run"], 2, &["failed to read the run none/run", "expected the output_dir of a run"]);
    check_error(&[&format!("{parent}/rnu")], 2, &["no such file or folder", "did you mean"]);
    check_error(&[parent], 2, &["it has 1 run in folders; name one, such as", path]);
    check_error(&[path, "--output", "/dev/null/page.html"], 1, &["failed to write /dev/null/page.html", "--output"]);
    folder.write("report.html", "<h1>years of work</h1>");
    check_error(&[path], 2, &["report.html exists and is no report of this program", "--output names another file"]);
    assert_eq!(read(&folder.path().join("report.html")), "<h1>years of work</h1>");
    folder.write("run.json", "{\"exit\":");
    check_error(&[path], 2, &["run.json", "name the metrics.jsonl of the run"]);
    fs::remove_file(folder.path().join("metrics.jsonl")).unwrap();
    fs::create_dir(folder.path().join("metrics.jsonl")).unwrap();
    fs::remove_file(folder.path().join("run.json")).unwrap();
    check_error(&[path], 2, &["metrics.jsonl", "not a regular file"]);
}
