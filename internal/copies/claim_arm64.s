#include "textflag.h"

// func claim(at *byte, lines int)
TEXT ·claim(SB), NOSPLIT, $0-16
	MOVD at+0(FP), R0
	MOVD lines+8(FP), R1
next:
	PRFM (R0), PSTL1KEEP
	ADD  $64, R0
	SUBS $1, R1
	BNE  next
	RET
