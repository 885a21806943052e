;; What takes the time of a forward and a backward, in float32, four values at a time: the matrix product, the softmax,
;; and GELU. All addresses are bytes in the memory that the page gives; all counts are of values, in multiples of 4.
;;
;; Products and sums are separate steps in a fixed order, so every machine gives the same bits. (The fused steps of
;; relaxed SIMD would be faster, and differ from one machine to the next.)
(module
  (memory (import "page" "memory") 1)

  ;; C = A·B + bias, of matrices with `rows` × `depth` and `depth` × `cols` values. `rows` is a multiple of 4, `cols` of
  ;; 8. Rows of A and C begin every `a_row` and `c_row` bytes, so that a head is read from, and written to, its columns
  ;; of a wider matrix. B is packed in panels of 8 columns, each with its `depth` rows of 8 values, so that the inner
  ;; loop reads it in the order of memory. `bias` has `cols` values.
  (func (export "gemm")
    (param $a i32) (param $a_row i32) (param $b i32) (param $c i32) (param $c_row i32) (param $bias i32)
    (param $rows i32) (param $cols i32) (param $depth i32)
    (local $a0 i32) (local $a1 i32) (local $a2 i32) (local $a3 i32) ;; next value of each of the four rows of A
    (local $to i32) (local $row i32) ;; the same four rows in C, and their number
    (local $at i32) (local $end i32) (local $panel i32) ;; row of the panel, end and size of the panel
    (local $next_rows i32) ;; from the end of a row of A to the beginning of the next
    (local $x v128) (local $left v128) (local $right v128) ;; one value of A four times, eight values of B
    (local $start_left v128) (local $start_right v128)
    (local $l0 v128) (local $l1 v128) (local $l2 v128) (local $l3 v128) ;; sums of the four rows, columns 0 to 3
    (local $r0 v128) (local $r1 v128) (local $r2 v128) (local $r3 v128) ;; and columns 4 to 7

    (local.set $panel (i32.shl (local.get $depth) (i32.const 5)))
    (local.set $next_rows (i32.sub (local.get $a_row) (i32.shl (local.get $depth) (i32.const 2))))
    (loop $columns
      (local.set $start_left (v128.load (local.get $bias)))
      (local.set $start_right (v128.load offset=16 (local.get $bias)))
      (local.set $end (i32.add (local.get $b) (local.get $panel))) (local.set $to (local.get $c))
      (local.set $a0 (local.get $a)) (local.set $row (i32.const 0))
      (loop $four_rows
        (local.set $a1 (i32.add (local.get $a0) (local.get $a_row)))
        (local.set $a2 (i32.add (local.get $a1) (local.get $a_row)))
        (local.set $a3 (i32.add (local.get $a2) (local.get $a_row)))
        (local.set $l0 (local.get $start_left)) (local.set $r0 (local.get $start_right))
        (local.set $l1 (local.get $start_left)) (local.set $r1 (local.get $start_right))
        (local.set $l2 (local.get $start_left)) (local.set $r2 (local.get $start_right))
        (local.set $l3 (local.get $start_left)) (local.set $r3 (local.get $start_right))
        (local.set $at (local.get $b))
        (loop $products
          (local.set $left (v128.load (local.get $at))) (local.set $right (v128.load offset=16 (local.get $at)))
          (local.set $x (v128.load32_splat (local.get $a0)))
          (local.set $l0 (f32x4.add (local.get $l0) (f32x4.mul (local.get $x) (local.get $left))))
          (local.set $r0 (f32x4.add (local.get $r0) (f32x4.mul (local.get $x) (local.get $right))))
          (local.set $x (v128.load32_splat (local.get $a1)))
          (local.set $l1 (f32x4.add (local.get $l1) (f32x4.mul (local.get $x) (local.get $left))))
          (local.set $r1 (f32x4.add (local.get $r1) (f32x4.mul (local.get $x) (local.get $right))))
          (local.set $x (v128.load32_splat (local.get $a2)))
          (local.set $l2 (f32x4.add (local.get $l2) (f32x4.mul (local.get $x) (local.get $left))))
          (local.set $r2 (f32x4.add (local.get $r2) (f32x4.mul (local.get $x) (local.get $right))))
          (local.set $x (v128.load32_splat (local.get $a3)))
          (local.set $l3 (f32x4.add (local.get $l3) (f32x4.mul (local.get $x) (local.get $left))))
          (local.set $r3 (f32x4.add (local.get $r3) (f32x4.mul (local.get $x) (local.get $right))))
          (local.set $a0 (i32.add (local.get $a0) (i32.const 4)))
          (local.set $a1 (i32.add (local.get $a1) (i32.const 4)))
          (local.set $a2 (i32.add (local.get $a2) (i32.const 4)))
          (local.set $a3 (i32.add (local.get $a3) (i32.const 4)))
          (br_if $products (i32.lt_u (local.tee $at (i32.add (local.get $at) (i32.const 32))) (local.get $end))))
        (local.set $a0 (i32.add (local.get $a3) (local.get $next_rows)))
        (v128.store (local.get $to) (local.get $l0)) (v128.store offset=16 (local.get $to) (local.get $r0))
        (local.set $to (i32.add (local.get $to) (local.get $c_row)))
        (v128.store (local.get $to) (local.get $l1)) (v128.store offset=16 (local.get $to) (local.get $r1))
        (local.set $to (i32.add (local.get $to) (local.get $c_row)))
        (v128.store (local.get $to) (local.get $l2)) (v128.store offset=16 (local.get $to) (local.get $r2))
        (local.set $to (i32.add (local.get $to) (local.get $c_row)))
        (v128.store (local.get $to) (local.get $l3)) (v128.store offset=16 (local.get $to) (local.get $r3))
        (local.set $to (i32.add (local.get $to) (local.get $c_row)))
        (br_if $four_rows (i32.lt_u (local.tee $row (i32.add (local.get $row) (i32.const 4))) (local.get $rows))))
      (local.set $b (local.get $end)) (local.set $bias (i32.add (local.get $bias) (i32.const 32)))
      (local.set $c (i32.add (local.get $c) (i32.const 32)))
      (br_if $columns (i32.gt_s (local.tee $cols (i32.sub (local.get $cols) (i32.const 8))) (i32.const 0)))))

  ;; eˣ of four values to 1e-7, from −87 to 88: 2ⁿ times a polynomial of the rest of x / ln 2 (Cephes, expf).
  (func $exp (param $x v128) (result v128)
    (local $n v128) (local $p v128)
    (local.set $x (f32x4.max (local.get $x) (v128.const f32x4 -87 -87 -87 -87)))
    (local.set $n (f32x4.nearest (f32x4.mul (local.get $x) (f32x4.splat (f32.const 1.44269504)))))
    (local.set $x (f32x4.sub (local.get $x) (f32x4.mul (local.get $n) (f32x4.splat (f32.const 0.693359375)))))
    (local.set $x (f32x4.add (local.get $x) (f32x4.mul (local.get $n) (f32x4.splat (f32.const 2.12194440e-4)))))
    (local.set $p (f32x4.splat (f32.const 1.9875691500e-4)))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $x)) (f32x4.splat (f32.const 1.3981999507e-3))))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $x)) (f32x4.splat (f32.const 8.3334519073e-3))))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $x)) (f32x4.splat (f32.const 4.1665795894e-2))))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $x)) (f32x4.splat (f32.const 1.6666665459e-1))))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $x)) (f32x4.splat (f32.const 5.0000001201e-1))))
    (local.set $p (f32x4.add (f32x4.mul (f32x4.mul (local.get $p) (local.get $x)) (local.get $x)) (local.get $x)))
    (f32x4.mul
      (f32x4.add (local.get $p) (f32x4.splat (f32.const 1)))
      (i32x4.shl (i32x4.add (i32x4.trunc_sat_f32x4_s (local.get $n)) (i32x4.splat (i32.const 127))) (i32.const 23))))

  ;; The softmax of each of `rows` rows of `cols` values in place.
  (func (export "softmax") (param $at i32) (param $rows i32) (param $cols i32)
    (local $to i32) (local $end i32) (local $x v128) (local $most v128) (local $sum v128)
    (loop $row
      (local.set $end (i32.add (local.get $at) (i32.shl (local.get $cols) (i32.const 2))))
      (local.set $to (local.get $at)) (local.set $most (v128.load (local.get $at)))
      (loop $largest
        (local.set $most (f32x4.max (local.get $most) (v128.load (local.get $to))))
        (br_if $largest (i32.lt_u (local.tee $to (i32.add (local.get $to) (i32.const 16))) (local.get $end))))
      (local.set $most (f32x4.max (local.get $most) (i8x16.shuffle 8 9 10 11 12 13 14 15 0 1 2 3 4 5 6 7
        (local.get $most) (local.get $most))))
      (local.set $most (f32x4.max (local.get $most) (i8x16.shuffle 4 5 6 7 0 1 2 3 12 13 14 15 8 9 10 11
        (local.get $most) (local.get $most))))
      (local.set $to (local.get $at)) (local.set $sum (f32x4.splat (f32.const 0)))
      (loop $powers
        (local.set $x (call $exp (f32x4.sub (v128.load (local.get $to)) (local.get $most))))
        (v128.store (local.get $to) (local.get $x)) (local.set $sum (f32x4.add (local.get $sum) (local.get $x)))
        (br_if $powers (i32.lt_u (local.tee $to (i32.add (local.get $to) (i32.const 16))) (local.get $end))))
      (local.set $sum (f32x4.add (local.get $sum) (i8x16.shuffle 8 9 10 11 12 13 14 15 0 1 2 3 4 5 6 7
        (local.get $sum) (local.get $sum))))
      (local.set $sum (f32x4.add (local.get $sum) (i8x16.shuffle 4 5 6 7 0 1 2 3 12 13 14 15 8 9 10 11
        (local.get $sum) (local.get $sum))))
      (local.set $to (local.get $at))
      (loop $shares
        (v128.store (local.get $to) (f32x4.div (v128.load (local.get $to)) (local.get $sum)))
        (br_if $shares (i32.lt_u (local.tee $to (i32.add (local.get $to) (i32.const 16))) (local.get $end))))
      (local.set $at (local.get $end))
      (br_if $row (local.tee $rows (i32.sub (local.get $rows) (i32.const 1))))))

  ;; Φ(x), the share of a normal distribution below x, to 1e-7 (Abramowitz and Stegun 7.1.26). `bell` is exp(−x²/2).
  (func $below (param $x v128) (param $bell v128) (result v128)
    (local $t v128) (local $p v128)
    (local.set $t (f32x4.div (f32x4.splat (f32.const 1)) (f32x4.add (f32x4.splat (f32.const 1))
      (f32x4.mul (f32x4.abs (local.get $x)) (f32x4.splat (f32.const 0.23164189))))))
    (local.set $p (f32x4.splat (f32.const 1.061405429)))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $t)) (f32x4.splat (f32.const -1.453152027))))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $t)) (f32x4.splat (f32.const 1.421413741))))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $t)) (f32x4.splat (f32.const -0.284496736))))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $t)) (f32x4.splat (f32.const 0.254829592))))
    (local.set $p (f32x4.mul (f32x4.mul (local.get $p) (local.get $t)) (f32x4.splat (f32.const 0.5))))
    (local.set $p (f32x4.mul (local.get $p) (local.get $bell))) ;; the share beyond |x|
    (v128.bitselect
      (local.get $p)
      (f32x4.sub (f32x4.splat (f32.const 1)) (local.get $p))
      (f32x4.lt (local.get $x) (f32x4.splat (f32.const 0)))))

  ;; exp(−x²/2)
  (func $bell (param $x v128) (result v128)
    (call $exp (f32x4.mul (f32x4.mul (local.get $x) (local.get $x)) (f32x4.splat (f32.const -0.5)))))

  ;; GELU, x·Φ(x), of `count` values in place.
  (func (export "gelu") (param $at i32) (param $count i32)
    (local $x v128)
    (loop $values
      (local.set $x (v128.load (local.get $at)))
      (v128.store (local.get $at)
        (f32x4.mul (local.get $x) (call $below (local.get $x) (call $bell (local.get $x)))))
      (local.set $at (i32.add (local.get $at) (i32.const 16)))
      (br_if $values (i32.gt_s (local.tee $count (i32.sub (local.get $count) (i32.const 4))) (i32.const 0)))))

  ;; Multiplies `count` gradients by the slope of GELU, Φ(x) + x·φ(x), at the values x that begin at `from`.
  (func (export "gelu_slope") (param $at i32) (param $from i32) (param $count i32)
    (local $x v128) (local $bell v128)
    (loop $values
      (local.set $x (v128.load (local.get $from)))
      (local.set $bell (call $bell (local.get $x)))
      (v128.store (local.get $at) (f32x4.mul (v128.load (local.get $at)) (f32x4.add
        (call $below (local.get $x) (local.get $bell))
        (f32x4.mul (f32x4.mul (local.get $x) (local.get $bell)) (f32x4.splat (f32.const 0.3989422804))))))
      (local.set $at (i32.add (local.get $at) (i32.const 16)))
      (local.set $from (i32.add (local.get $from) (i32.const 16)))
      (br_if $values (i32.gt_s (local.tee $count (i32.sub (local.get $count) (i32.const 4))) (i32.const 0))))))
