//! Check of the pages' command lines against the program's own definitions.

use ckpt_run::cli;

use super::pages;

/// Languages of blocks without commands.
const NO_COMMANDS: [&str; 3] = ["text", "json", "toml"];
/// Shell operators that end a command.
const OPERATORS: [&str; 12] = [
    "|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>>", "2>&1", "&>",
];

/// Returns the text before the parenthesis that closes the one in front of it.
fn until_closed(text: &str) -> &str {
    let mut depth = 1;
    let end = text.char_indices().find(|(_, letter)| {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        depth == 0
    });
    end.map_or(text, |(place, _)| &text[..place])
}

/// Returns the `ckpt-run` command lines in a shell's line: after `$ `, in pipes, in `$(…)`, on another host.
fn ours(line: &str) -> Vec<Vec<String>> {
    let mut found = vec![];
    for (place, _) in line.match_indices("$(") {
        found.extend(ours(until_closed(&line[place + 2..])));
    }
    let line = line.trim().trim_start_matches("$ ");
    let Some(words) = shlex::split(line) else {
        assert!(!line.starts_with("ckpt-run "), "not a shell's line: {line}");
        return found;
    };
    for command in words.split(|word| OPERATORS.contains(&word.as_str())) {
        let by_path = command.first().filter(|word| word.ends_with("/ckpt-run"));
        let place = command.iter().position(|word| word == "ckpt-run");
        if let Some(place) = by_path.map(|_| 0).or(place) {
            found.push(command[place..].to_vec());
        }
    }
    found
}

/// Replacements for `GPU-A` and `GPU-B`.
const UUIDS: [(&str, &str); 2] = [
    ("GPU-A", "GPU-6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6a"),
    ("GPU-B", "GPU-6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6b"),
];

fn parse(line: &[String]) -> Result<(), String> {
    let in_full = |word: &String| {
        let fill = |word: String, (short, uuid)| word.replace(short, uuid);
        UUIDS.into_iter().fold(word.clone(), fill)
    };
    let line: Vec<String> = line.iter().map(in_full).collect();
    let words: Vec<&str> = line.iter().map(String::as_str).collect();
    cli::parses(&words)
}

#[test]
fn every_command_line_is_understood() {
    let mut count = 0;
    for page in pages::all() {
        let blocks = page.blocks.iter();
        for block in blocks.filter(|block| !NO_COMMANDS.iter().any(|word| block.has(word))) {
            for line in block.text.replace("\\\n", " ").lines() {
                for command in ours(line) {
                    count += 1;
                    let understood = parse(&command);
                    assert!(
                        understood.is_ok(),
                        "{}: {line}\n{}",
                        page.path.display(),
                        understood.unwrap_err()
                    );
                }
            }
        }
    }
    assert!(count > 60, "{count}");
}

#[test]
fn every_command_in_a_sentence_is_understood() {
    for page in pages::all() {
        let complete = |span: &&String| !span.contains('[') && !span.contains('…');
        let spans = page.spans.iter().filter(complete);
        for span in spans.filter(|span| span.starts_with("ckpt-run ")) {
            for command in ours(span) {
                let error = parse(&command).err().unwrap_or_default();
                // A verb may be named without its arguments, and a group of verbs without a verb.
                let good = error.is_empty()
                    || error.contains("\nCommands:\n")
                    || error.contains("required arguments were not provided");
                assert!(good, "{}: {span}\n{error}", page.path.display());
            }
        }
    }
}

#[test]
fn missing_files_and_programs_are_found() {
    for wrong in [
        "ckpt-run lst",
        "$ ckpt-run list --no-such-flag   # no",
        "true | ckpt-run import",
        "target/release/ckpt-run ./train",
        "kill $(ckpt-run state --json | jq .pid)",
        "ssh host ckpt-run improt -",
    ] {
        let commands = ours(wrong);
        assert!(!commands.is_empty(), "{wrong}");
        assert!(commands.iter().any(|line| parse(line).is_err()), "{wrong}");
    }
    assert!(ours("scripts/gpu-test --bin target/release/ckpt-run").is_empty());
}
