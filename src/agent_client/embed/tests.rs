use std::fs;

use super::*;

#[test]
fn the_library_lies_readable_for_all_and_is_written_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = install(folder.path()).unwrap();
    let first = fs::metadata(&path).unwrap();
    assert_eq!(first.permissions().mode() & 0o7777, 0o755);
    assert_eq!(install(folder.path()).unwrap(), path);
    assert_eq!(fs::metadata(&path).unwrap().ino(), first.ino());
    for damage in [&b""[..], b"x", &LIBRARY[..LIBRARY.len() - 1]] {
        fs::write(&path, damage).unwrap();
        assert_eq!(install(folder.path()).unwrap(), path);
        assert_eq!(fs::read(&path).unwrap(), LIBRARY);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    for name in ["a b", "a:b", "$ORIGIN"] {
        let folder = folder.path().join(name);
        fs::create_dir(&folder).unwrap();
        assert_eq!(
            install(&folder).unwrap_err().kind(),
            std::io::ErrorKind::InvalidInput
        );
    }
}

#[test]
fn nothing_is_linked_to_the_agent() {
    let has = |text: &[u8]| LIBRARY.windows(text.len()).any(|bytes| bytes == text);
    assert!(has(b"dl_iterate_phdr") && !has(b"libc.so") && !has(b"GLIBC"));
    assert!(LIBRARY.starts_with(b"\x7fELF") && LIBRARY.len() < 64 << 10);
}

#[test]
fn the_agent_comes_before_what_the_job_preloads() {
    let token: Token = "00112233445566778899aabbccddeeff".parse().unwrap();
    let variables = |existing: Option<&str>| {
        let set = environment(
            Path::new("/a.so"),
            &token,
            existing.map(std::ffi::OsStr::new),
        );
        set.into_iter()
            .map(|(_, value)| value.into_string().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        variables(None),
        ["/a.so", "00112233445566778899aabbccddeeff"]
    );
    assert_eq!(variables(Some(""))[0], "/a.so");
    assert_eq!(variables(Some("b.so c.so"))[0], "/a.so:b.so c.so");
}

#[test]
fn a_token_is_its_text() {
    let token = Token::random().unwrap();
    assert_ne!(token, Token::random().unwrap());
    assert_eq!(token.to_string().parse::<Token>().unwrap(), token);
    let text = serde_json::to_string(&token).unwrap();
    assert_eq!(text, format!("\"{token}\""));
    assert_eq!(serde_json::from_str::<Token>(&text).unwrap(), token);
    let text = token.to_string();
    for wrong in [
        "",
        "00",
        &text[1..],
        &format!("{text}0"),
        &format!("{}G", &text[1..]),
        &text
            .to_uppercase()
            .replace(|digit: char| digit.is_ascii_digit(), "A"),
    ] {
        assert!(wrong.parse::<Token>().is_err(), "{wrong}");
    }
}
